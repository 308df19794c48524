/** The policies in force, and a switch. */

import { useEffect, useState } from "preact/hooks";
import { ApiProblem, getJson, postJson } from "../api.ts";
import { KINDS, type Kind, type PoliciesAnswer, type SchedulerView } from "../types.ts";

const AGAIN_MS = 2000;

export function PolicySwitch({ view }: { view: SchedulerView }) {
  const [known, setKnown] = useState<PoliciesAnswer | null>(null);
  const [wanted, setWanted] = useState<Partial<Record<Kind | "preset", string>>>({});
  const [said, setSaid] = useState("");
  const [problem, setProblem] = useState("");
  const [refused, setRefused] = useState("");
  const [busy, setBusy] = useState(false);
  const inForce = KINDS.map((kind) => view.policies[kind]).join(" ");
  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    const load = async () => {
      try {
        const found = await getJson<PoliciesAnswer>("v1/policies", leaving.signal);
        setKnown(found);
        setRefused(found.why_not_settable ?? "");
        setProblem("");
      } catch (error) {
        if (leaving.signal.aborted) return;
        const isRefusal = error instanceof ApiProblem && (error.status === 401 || error.status === 403);
        if (isRefusal) setRefused(reason(error));
        else {
          setProblem(reason(error));
          timer = window.setTimeout(load, AGAIN_MS); // a scheduler that has just come back
        }
      }
    };
    void load();
    return () => {
      leaving.abort();
      clearTimeout(timer);
    };
  }, [view.epoch, inForce]);
  const apply = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const answer = await postJson<PoliciesAnswer>("v1/policies", wanted);
      setKnown(answer);
      setWanted({});
      setSaid(`In force: ${answer.preset || "no preset"}. The charts mark the change.`);
    } catch (error) {
      setSaid(reason(error));
    } finally {
      setBusy(false);
    }
  };
  const choose = (name: Kind | "preset") => (event: Event & { currentTarget: HTMLSelectElement }) =>
    setWanted({ ...wanted, [name]: event.currentTarget.value || undefined });
  const isOffered = known !== null && !refused;
  const failed = view.failed_policies.length > 0;
  return (
    <section class="card" aria-labelledby="policies-title">
      <div class="row spread">
        <h2 id="policies-title">Policies</h2>
        <p class="muted">
          in force: <strong data-preset={view.policies.preset}>{view.policies.preset || "no preset"}</strong>
        </p>
      </div>
      {failed && <p class="notice bad">Failed, and replaced by the defaults: {view.failed_policies.join(", ")}</p>}
      {refused && <p class="notice">They cannot be switched here: {refused}.</p>}
      <form onSubmit={apply}>
        <div class="policy-fields">
          <label class="field">
            Preset
            <select name="preset" value={wanted.preset ?? ""} onChange={choose("preset")} disabled={!isOffered}>
              <option value="">{view.policies.preset || "(none)"}</option>
              {known?.presets.filter((name) => name !== view.policies.preset).map((name) => (
                <option key={name} value={name}>
                  {name}
                </option>
              ))}
            </select>
          </label>
          {KINDS.map((kind) => (
            <label key={kind} class="field">
              {kind[0]?.toUpperCase() + kind.slice(1)}
              <select name={kind} value={wanted[kind] ?? ""} onChange={choose(kind)} disabled={!isOffered}>
                <option value="">{view.policies[kind]}</option>
                {known?.known[kind]
                  .filter((name) => name !== view.policies[kind])
                  .map((name) => (
                    <option key={name} value={name}>
                      {name}
                    </option>
                  ))}
              </select>
            </label>
          ))}
        </div>
        <div class="row">
          <button class="primary" type="submit" disabled={busy || !isOffered || !Object.values(wanted).some(Boolean)}>
            Switch
          </button>
          <span role="status">{problem || said}</span>
        </div>
      </form>
    </section>
  );
}

function reason(error: unknown): string {
  return error instanceof ApiProblem ? error.message : "The gateway does not answer.";
}
