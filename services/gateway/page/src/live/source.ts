/** One stream of /v1/live for the whole page. It runs while a view uses it and the tab is visible. */

import { useEffect, useState } from "preact/hooks";
import { ApiProblem, apiFetch, onKeyChange } from "../api.ts";
import type { LiveSnapshot } from "../types.ts";
import { extended, NO_HISTORY, type History } from "./history.ts";
import { eventsOf } from "./sse.ts";

/** Without a snapshot for this long the connection counts as lost. Snapshots come once a second. */
const SILENCE_MS = 5000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 5000;
/** Drawing is most of what an open page costs its machine, so it is limited to 1/200 of the time. On a slow or busy
 * machine, the page leaves snapshots out, but never for longer than LONGEST_PAUSE_MS. */
const PAUSE_PER_DRAWING = 200;
const SHORTEST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 3500;

export interface LiveState {
  snapshot: LiveSnapshot | null;
  /** The last snapshot that had a scheduler, to show what ran before it went. */
  lastWhole: LiveSnapshot | null;
  history: History;
  /** The gateway's refusal; null while it answers. */
  problem: ApiProblem | null;
  /** Since when (ms, this page's clock) no snapshot has come; null while they come. */
  silentSince: number | null;
  /** Since when snapshots have no scheduler. */
  withoutSchedulerSince: number | null;
}

class LiveSource {
  state: LiveState = {
    snapshot: null,
    lastWhole: null,
    history: NO_HISTORY,
    problem: null,
    silentSince: null,
    withoutSchedulerSince: null,
  };
  private readonly listeners = new Set<(state: LiveState) => void>();
  private running: AbortController | null = null;
  private latestAt = 0;
  private drawnAt = -Infinity;
  private pauseMs = SHORTEST_PAUSE_MS;

  constructor() {
    document.addEventListener("visibilitychange", () => this.update());
    onKeyChange(() => {
      this.stop();
      this.set({ problem: null });
      this.update();
    });
  }

  subscribe(listener: (state: LiveState) => void): () => void {
    this.listeners.add(listener);
    this.update();
    return () => {
      this.listeners.delete(listener);
      this.update();
    };
  }

  private update(): void {
    const wanted = this.listeners.size > 0 && !document.hidden;
    if (wanted && !this.running) void this.run((this.running = new AbortController()));
    if (!wanted) this.stop();
  }

  private stop(): void {
    this.running?.abort();
    this.running = null;
  }

  private set(change: Partial<LiveState>): void {
    this.state = { ...this.state, ...change };
    this.draw();
  }

  private draw(): void {
    const began = (this.drawnAt = performance.now());
    for (const listener of this.listeners) listener(this.state);
    // Preact has queued its work, so this runs after it: scripts first, then layout, paint and effects in a frame.
    queueMicrotask(() => {
      const scriptsMs = performance.now() - began;
      requestAnimationFrame((frame) => {
        setTimeout(() => {
          const drawingMs = scriptsMs + performance.now() - frame;
          const pauseMs = PAUSE_PER_DRAWING * drawingMs - SHORTEST_PAUSE_MS;
          this.pauseMs = Math.min(Math.max(pauseMs, SHORTEST_PAUSE_MS), LONGEST_PAUSE_MS);
        });
      });
    });
  }

  private async run(running: AbortController): Promise<void> {
    const { signal } = running;
    let retryMs = FIRST_RETRY_MS;
    this.latestAt = performance.now();
    // Draws each second while no snapshot comes, so that "for 3 s" counts up. Otherwise take() decides.
    const clock = setInterval(() => {
      if (this.state.silentSince !== null) this.set({});
    }, 1000);
    signal.addEventListener("abort", () => clearInterval(clock));
    while (!signal.aborted) {
      const attempt = new AbortController();
      const abort = () => attempt.abort();
      signal.addEventListener("abort", abort);
      const watchdog = setInterval(() => {
        if (performance.now() - this.latestAt > SILENCE_MS) abort();
      }, 1000);
      try {
        const response = await apiFetch("v1/live?stream=true", { signal: attempt.signal });
        if (!response.body) throw new TypeError("the answer has no body");
        for await (const data of eventsOf(response.body)) {
          if (signal.aborted) return;
          this.take(JSON.parse(data) as LiveSnapshot);
          retryMs = FIRST_RETRY_MS;
        }
      } catch (error) {
        if (signal.aborted) return;
        const problem = error instanceof ApiProblem ? error : null;
        this.set({ problem });
        if (problem?.needsKey) return;
      } finally {
        clearInterval(watchdog);
        signal.removeEventListener("abort", abort);
      }
      if (signal.aborted) return;
      this.set({ silentSince: this.state.silentSince ?? performance.now() });
      await new Promise((resolve) => setTimeout(resolve, retryMs));
      retryMs = Math.min(2 * retryMs, LAST_RETRY_MS);
      this.latestAt = performance.now();
    }
  }

  private take(snapshot: LiveSnapshot): void {
    const { snapshot: before, problem, silentSince } = this.state;
    this.latestAt = performance.now();
    const history = extended(this.state.history, before, snapshot);
    this.state = {
      snapshot,
      lastWhole: snapshot.scheduler ? snapshot : this.state.lastWhole,
      history,
      problem: null,
      silentSince: null,
      withoutSchedulerSince: snapshot.scheduler ? null : (this.state.withoutSchedulerSince ?? performance.now()),
    };
    const isNews = problem !== null || silentSince !== null || history.marks.at(-1)?.atS === snapshot.at_s;
    if (isNews || this.latestAt - this.drawnAt > this.pauseMs) this.draw();
  }
}

let source: LiveSource | undefined;

/** The live state. While a component that calls this is mounted and the tab is visible, the stream is open. */
export function useLive(): LiveState {
  const shared = (source ??= new LiveSource());
  const [state, setState] = useState(shared.state);
  useEffect(() => shared.subscribe(setState), [shared]);
  return state;
}
