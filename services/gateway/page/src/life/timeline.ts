/** Turns a request's timeline into bars: what the request did at each moment. */

import type { TimelineSpan } from "../types.ts";
import { reasonClass, type ReasonClass } from "./reasons.ts";

export interface Bar {
  reason: string;
  kind: ReasonClass;
  fromS: number;
  toS: number;
}

const EVENTS = new Set(["waiting", "running", "preempted", "requeued", "ended"]);

/** Phases from one event to the next, in order. `endS`: the end of the last one if the request has not ended. */
export function phases(spans: TimelineSpan[], endS: number): Bar[] {
  const events = spans.filter((span) => span.from_s === span.to_s && EVENTS.has(span.reason));
  const bars: Bar[] = [];
  events.forEach((event, index) => {
    if (event.reason === "ended") return;
    const toS = events[index + 1]?.from_s ?? Math.max(endS, event.from_s);
    bars.push({ reason: event.reason, kind: reasonClass(event.reason), fromS: event.from_s, toS });
  });
  return bars;
}

/** Why it waited: the spans that have a duration. */
export function waits(spans: TimelineSpan[]): TimelineSpan[] {
  return spans.filter((span) => span.to_s > span.from_s);
}

export function hasEnded(spans: TimelineSpan[]): boolean {
  return spans.at(-1)?.reason === "ended";
}

/** The last second that the timeline knows. */
export function lastS(spans: TimelineSpan[]): number {
  return Math.max(0, ...spans.map((span) => span.to_s));
}

/** Seconds by kind of phase. */
export function totals(bars: Bar[]): Record<ReasonClass, number> {
  const sum: Record<ReasonClass, number> = { runs: 0, waits: 0, back: 0, ended: 0 };
  for (const bar of bars) sum[bar.kind] += bar.toS - bar.fromS;
  return sum;
}
