/** Two presets beside each other: the same mix of requests under each, on the running server. */

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiProblem, getJson, onKeyChange } from "../api.ts";
import { rate, seconds } from "../format.ts";
import { KeyForm } from "../shell/key.tsx";
import type { PoliciesAnswer } from "../types.ts";
import { DEFAULT_MIX, MOST_PARTS, mixProblem, rowsOf, type Part, type Run } from "./mix.ts";
import { compare } from "./run-mix.ts";
import { Strips } from "./strips.tsx";

/** `isShown`: the page asks for the presets only while this is shown, because that needs an admin key. */
export function PresetComparison({ isShown }: { isShown: boolean }) {
  const { known, problem } = usePresets(isShown);
  const [chosen, setChosen] = useState<[string, string]>(["paceline", "vllm-v1"]);
  const [mix, setMix] = useState<Part[]>(DEFAULT_MIX);
  const [runs, setRuns] = useState<{ runs: Run[]; mix: Part[] } | null>(null);
  const [said, setSaid] = useState("");
  const [running, setRunning] = useState(false);
  const leaving = useRef<AbortController | null>(null);
  const wrong = mixProblem(mix);
  if (problem?.needsKey) return <KeyForm why={problem.message} />;
  if (problem) return <p class="notice bad">{problem.message}</p>;
  if (known?.why_not_settable) return <p class="notice">Presets cannot be compared here: {known.why_not_settable}.</p>;

  const start = async (event: Event) => {
    event.preventDefault();
    leaving.current = new AbortController();
    setRunning(true);
    setRuns(null);
    try {
      const found = await compare(chosen, mix, leaving.current.signal, setSaid);
      setRuns({ runs: found, mix });
      setSaid("Done. The earlier policies are in force again.");
    } catch (error) {
      const why = leaving.current.signal.aborted ? "Stopped." : (error as Error).message;
      setSaid(`${why} If policies changed, the page has tried to restore them: the live view shows those in force.`);
    } finally {
      setRunning(false);
    }
  };
  return (
    <div class="stack">
      <form class="card stack" onSubmit={start}>
        <h2>The same requests under two presets</h2>
        <p class="notice">
          A preset is for the whole server: for some seconds it schedules the requests of all users. The earlier
          policies are restored at the end.
        </p>
        <div class="row">
          {chosen.map((name, index) => (
            <label key={index} class="field">
              {index === 0 ? "First" : "Second"} preset
              <select
                name={`preset-${index + 1}`}
                value={name}
                onChange={({ currentTarget }) =>
                  setChosen(index === 0 ? [currentTarget.value, chosen[1]] : [chosen[0], currentTarget.value])
                }
              >
                {(known?.presets ?? chosen).map((preset) => (
                  <option key={preset}>{preset}</option>
                ))}
              </select>
            </label>
          ))}
        </div>
        <Mix mix={mix} onChange={setMix} />
        {wrong && <p class="option-problem">{wrong}</p>}
        <div class="row">
          <button class="primary" type="submit" disabled={running || wrong !== "" || !known}>
            Compare
          </button>
          <button type="button" disabled={!running} onClick={() => leaving.current?.abort()}>
            Stop
          </button>
          <span role="status">{said}</span>
        </div>
      </form>
      {runs && <Results {...runs} />}
    </div>
  );
}

function usePresets(isShown: boolean): { known: PoliciesAnswer | null; problem: ApiProblem | null } {
  const [known, setKnown] = useState<PoliciesAnswer | null>(null);
  const [problem, setProblem] = useState<ApiProblem | null>(null);
  useEffect(() => {
    if (!isShown) return undefined;
    const load = () =>
      getJson<PoliciesAnswer>("v1/policies").then(
        (found) => {
          setKnown(found);
          setProblem(null);
        },
        (error: unknown) =>
          setProblem(error instanceof ApiProblem ? error : new ApiProblem(0, "The gateway does not answer.")),
      );
    void load();
    return onKeyChange(() => void load());
  }, [isShown]);
  return { known, problem };
}

const COLUMNS: [keyof Part, string][] = [
  ["count", "requests"],
  ["prompt", "prompt"],
  ["times", "times"],
  ["maxTokens", "output tokens"],
  ["tenant", "tenant"],
  ["afterS", "start (s)"],
];

function Mix({ mix, onChange }: { mix: Part[]; onChange: (mix: Part[]) => void }) {
  const set = (index: number, change: Partial<Part>) =>
    onChange(mix.map((part, at) => (at === index ? { ...part, ...change } : part)));
  return (
    <fieldset class="mix">
      <legend>Mix</legend>
      {mix.map((part, index) => (
        <div key={index} class="mix-part">
          {COLUMNS.map(([name, label]) => (
            <label key={name} class={`field mix-${name}`}>
              {label}
              <input
                type="text"
                inputMode={typeof part[name] === "number" ? "decimal" : "text"}
                value={String(part[name])}
                onInput={({ currentTarget: { value } }) =>
                  set(index, { [name]: typeof DEFAULT_MIX[0]?.[name] === "number" ? Number(value) : value })
                }
              />
            </label>
          ))}
          <button
            type="button"
            class="plain"
            aria-label={`Remove part ${index + 1}`}
            disabled={mix.length === 1}
            onClick={() => onChange(mix.filter((_, at) => at !== index))}
          >
            ✕
          </button>
        </div>
      ))}
      <button
        type="button"
        disabled={mix.length >= MOST_PARTS}
        onClick={() => onChange([...mix, { ...(mix.at(-1) as Part), tenant: "" }])}
      >
        Add a part
      </button>
    </fieldset>
  );
}

function Results({ runs, mix }: { runs: Run[]; mix: Part[] }) {
  const pair = (values: (number | null)[]) => values.map(seconds).join(" / ");
  return (
    <section class="card stack" aria-label="Results">
      <Strips runs={runs} mix={mix} />
      <div class="scroll-x">
        <table class="num">
          <thead>
            <tr>
              <th>preset</th>
              <th>requests</th>
              <th>first token, p50 / p99</th>
              <th>time per token, p50 / p99</th>
              <th>whole request, p50 / p99</th>
              <th>tokens/s</th>
            </tr>
          </thead>
          <tbody>
            {runs.flatMap((run) =>
              rowsOf(run, mix).map((row, index) => (
                <tr key={`${run.preset} ${index}`}>
                  <td>{run.preset}</td>
                  <td>{row.label}</td>
                  <td>{pair(row.ttft)}</td>
                  <td>{pair(row.token)}</td>
                  <td>{pair(row.e2e)}</td>
                  <td>{index === 0 ? rate(run.numTokens / run.durationS) : ""}</td>
                </tr>
              )),
            )}
          </tbody>
        </table>
      </div>
    </section>
  );
}
