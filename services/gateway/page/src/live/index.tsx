/** The live view: what the scheduler, the cache and the workers do now. */

import { useEffect } from "preact/hooks";
import "../style/live.css";
import { KeyForm } from "../shell/key.tsx";
import { Figures } from "./figures.tsx";
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
  const scheduler = snapshot?.scheduler ?? null;
  return (
    <div class="live">
      <h2 class="visually-hidden">Live view</h2>
      <Status state={state} />
      {snapshot && (
        <div class={`live-body ${silentSince === null ? "" : "stale"}`}>
          <Figures snapshot={snapshot} history={history} />
          {scheduler && <Workers view={scheduler} maps={snapshot.cache?.maps ?? []} />}
          {scheduler && <Steps view={scheduler} steps={history.steps} />}
          <div class="columns">
            {scheduler && <Requests view={scheduler} />}
            <div class="stack">
              <Services snapshot={snapshot} />
              {scheduler && <PolicySwitch view={scheduler} />}
              {scheduler && <Tenants view={scheduler} />}
            </div>
          </div>
          {snapshot.cache && <PrefixTree cache={snapshot.cache} />}
        </div>
      )}
    </div>
  );
}
