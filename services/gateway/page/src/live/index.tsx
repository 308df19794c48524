/** The live view: what the scheduler, the cache and the workers do now. */

import { useEffect } from "preact/hooks";
import "../style/live.css";
import { age } from "../format.ts";
import { KeyForm } from "../shell/key.tsx";
import { Figures } from "./figures.tsx";
import type { Mark } from "./history.ts";
import { PolicySwitch } from "./policies.tsx";
import { Requests } from "./requests.tsx";
import { Services } from "./services.tsx";
import { useLive } from "./source.ts";
import { Status } from "./status.tsx";
import { Steps } from "./steps.tsx";
import { Tenants } from "./tenants.tsx";
import { PrefixTree } from "./tree.tsx";
import { Workers } from "./workers.tsx";

export function LiveView() {
  const state = useLive();
  const { snapshot, history, problem, silentSince } = state;
  useEffect(() => {
    document.title = "Paceline: live";
  }, []);
  if (problem?.needsKey) return <KeyForm why={`The live view needs an admin key. ${problem.message}`} />;
  const whole = state.lastWhole;
  const scheduler = whole?.scheduler ?? null;
  const isOld = snapshot !== whole;
  return (
    <div class="live">
      <h2 class="visually-hidden">Live view</h2>
      <Status state={state} />
      {snapshot && (
        <div class={`live-body ${silentSince === null ? "" : "stale"}`}>
          <Figures snapshot={snapshot} history={history} />
          <Marks marks={history.marks} nowS={snapshot.at_s} />
          <Services snapshot={snapshot} />
          {isOld && scheduler && (
            <p class="muted">
              Below is what the scheduler showed last, {age(snapshot.at_s - scheduler.at_s)} ago.
            </p>
          )}
          <div class={`live-body ${isOld ? "stale" : ""}`} inert={isOld}>
            {scheduler && <Workers view={scheduler} maps={whole?.cache?.maps ?? []} />}
            {scheduler && <Steps view={scheduler} steps={history.steps} />}
            <div class="columns">
              {scheduler && <Requests view={scheduler} />}
              <div class="stack">
                {scheduler && <PolicySwitch view={scheduler} />}
                {scheduler && <Tenants view={scheduler} />}
              </div>
            </div>
          </div>
          {snapshot.cache && <PrefixTree cache={snapshot.cache} />}
        </div>
      )}
    </div>
  );
}

/** What the dashed lines in the charts are. */
function Marks({ marks, nowS }: { marks: Mark[]; nowS: number }) {
  if (!marks.length) return null;
  return (
    <ul class="marks muted num" aria-label="Changes that the charts mark">
      {marks.map((mark) => (
        <li key={mark.atS}>
          {age(nowS - mark.atS)} ago: {mark.text}
        </li>
      ))}
    </ul>
  );
}
