/** Whether the figures are current, in one plain sentence. */

import { age } from "../format.ts";
import type { LiveState } from "./source.ts";

export interface Said {
  text: string;
  bad: boolean;
}

/** `nowMs`: on the clock of performance.now(). */
export function connectionSaid(state: LiveState, nowMs: number): Said {
  const { snapshot, silentSince, withoutSchedulerSince, problem } = state;
  const since = (ms: number) => age((nowMs - ms) / 1000);
  if (problem) return { text: `The gateway refuses the live view: ${problem.message}. It is asked again.`, bad: true };
  if (silentSince !== null) {
    return { text: `No connection to the gateway for ${since(silentSince)}. Trying again.`, bad: true };
  }
  if (!snapshot) return { text: "Connecting …", bad: false };
  if (withoutSchedulerSince !== null) {
    const streams = snapshot.gateway.live_requests;
    const going = streams ? ` ${streams} live ${streams === 1 ? "request waits" : "requests wait"} for it.` : "";
    return { text: `No connection to the scheduler for ${since(withoutSchedulerSince)}.${going}`, bad: true };
  }
  if (snapshot.gateway.draining) return { text: "The gateway is shutting down: it takes no new requests.", bad: true };
  if (snapshot.scheduler && !snapshot.scheduler.cache_connected) {
    return { text: "The scheduler has no connection to the cache.", bad: true };
  }
  if (!snapshot.gateway.ready) return { text: "The server is not ready: /ready says why.", bad: true };
  return { text: "", bad: false };
}

function presetSaid(preset: string): string {
  return preset ? `preset ${preset}` : "policies of no preset";
}

export function Status({ state }: { state: LiveState }) {
  const { text, bad } = connectionSaid(state, performance.now());
  const { snapshot } = state;
  return (
    <div class="status">
      <p class="row">
        <span class={`tag ${bad ? "tag-bad" : snapshot ? "tag-good" : ""}`} data-state={bad ? "bad" : "good"}>
          {bad ? "✕ not live" : snapshot ? "● live" : "…"}
        </span>
        {snapshot && <strong>{snapshot.gateway.model}</strong>}
        {snapshot?.scheduler && <span class="muted">{presetSaid(snapshot.scheduler.policies.preset)}</span>}
      </p>
      <div role="status">{text && <p class={`notice ${bad ? "bad" : ""}`}>{text}</p>}</div>
    </div>
  );
}
