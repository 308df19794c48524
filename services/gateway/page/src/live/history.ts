/** What the page remembers of snapshots: one minute of figures, and ten seconds of steps. */

import { KINDS, type LiveSnapshot, type Policies, type Step } from "../types.ts";

export const WINDOW_S = 60;
const STEPS_S = 10;
const MAX_STEPS = 4096;

/** Figures of one snapshot. null: not known, for example while there is no scheduler. */
export interface Sample {
  atS: number;
  running: number | null;
  waiting: number | null;
  tokensPerS: number;
  ttft: [number | null, number | null, number | null];
  itl: [number | null, number | null, number | null];
  usedBlocks: number | null;
  hitShare: number | null;
  preemptions: number | null;
  /** Preemptions since the sample before. */
  newPreemptions: number | null;
  epoch: number | null;
}

/** Something that happened, as a line in the charts. */
export interface Mark {
  atS: number;
  text: string;
}

export interface History {
  samples: Sample[];
  marks: Mark[];
  steps: Step[];
}

export const NO_HISTORY: History = { samples: [], marks: [], steps: [] };

export function extended(history: History, before: LiveSnapshot | null, shown: LiveSnapshot): History {
  const since = shown.at_s - WINDOW_S - 1;
  const marks = history.marks.filter((mark) => mark.atS >= since);
  const text = change(before, shown);
  if (text) marks.push({ atS: shown.at_s, text });
  const samples = history.samples.filter((sample) => sample.atS >= since);
  samples.push(sampleOf(shown, samples.at(-1)));
  return { samples, marks, steps: extendedSteps(history.steps, before, shown) };
}

function extendedSteps(steps: Step[], before: LiveSnapshot | null, shown: LiveSnapshot): Step[] {
  const view = shown.scheduler;
  if (!view) return steps;
  // A restarted scheduler has new links, and its clock may have another offset.
  const kept = before?.scheduler && before.scheduler.epoch !== view.epoch ? [] : steps;
  const since = view.at_s - STEPS_S;
  return [...kept.filter((step) => step.ended_s >= since), ...view.steps].slice(-MAX_STEPS);
}

function sampleOf(shown: LiveSnapshot, before: Sample | undefined): Sample {
  const { gateway, scheduler } = shown;
  const load = scheduler?.load;
  const { ttft_s: ttft, itl_s: itl } = gateway;
  const preemptions = load?.num_preemptions ?? null;
  const epoch = scheduler?.epoch ?? null;
  const comparable = before?.preemptions !== null && before?.epoch === epoch;
  return {
    atS: shown.at_s,
    running: load?.num_running ?? null,
    waiting: load?.num_waiting ?? null,
    tokensPerS: gateway.tokens_per_s,
    ttft: [ttft.p50, ttft.p90, ttft.p99],
    itl: [itl.p50, itl.p90, itl.p99],
    usedBlocks: load?.num_used_blocks ?? null,
    hitShare: load?.prefix_query_tokens ? load.prefix_hit_tokens / load.prefix_query_tokens : null,
    preemptions,
    newPreemptions: preemptions !== null && before && comparable ? preemptions - (before.preemptions ?? 0) : null,
    epoch,
  };
}

/** The change between two snapshots that a chart marks; "" if there is none. */
function change(before: LiveSnapshot | null, shown: LiveSnapshot): string {
  if (!before) return "";
  const [old, now] = [before.scheduler, shown.scheduler];
  if (old && !now) return "scheduler gone";
  if (!old && now) return "scheduler back";
  if (!old || !now) return "";
  return policyChange(old.policies, now.policies) || workerChange(old.workers.length, now.workers.length);
}

function policyChange(old: Policies, now: Policies): string {
  if (old.preset !== now.preset && now.preset) return `preset ${now.preset}`;
  const changed = KINDS.filter((kind) => old[kind] !== now[kind]);
  return changed.map((kind) => `${kind} ${now[kind]}`).join(", ");
}

function workerChange(old: number, now: number): string {
  if (old === now) return "";
  return now < old ? "a worker left" : "a worker joined";
}

/** Lanes for steps that overlap, because several plans are in flight: for each step (by planned_s) its lane from 0. */
export function lanes(steps: Step[], most: number): { step: Step; lane: number }[] {
  const ends: number[] = [];
  return [...steps]
    .sort((a, b) => a.planned_s - b.planned_s)
    .map((step) => {
      let lane = ends.findIndex((end) => end <= step.planned_s);
      if (lane < 0) lane = ends.length < most ? ends.length : ends.indexOf(Math.min(...ends));
      ends[lane] = step.ended_s;
      return { step, lane };
    });
}

/** Seconds of the phases of a step, or their means over steps. */
export interface Phases {
  scheduler: number;
  link: number;
  device: number;
}

export function phasesOf(step: Step): Phases {
  const device = Math.min(step.computed_s, step.ended_s - step.sent_s);
  return {
    scheduler: Math.max(step.sent_s - step.planned_s, 0),
    link: Math.max(step.ended_s - step.sent_s - device, 0),
    device: Math.max(device, 0),
  };
}

export function meanPhases(steps: Step[]): Phases | null {
  if (!steps.length) return null;
  const sum: Phases = { scheduler: 0, link: 0, device: 0 };
  for (const step of steps) {
    const phases = phasesOf(step);
    sum.scheduler += phases.scheduler;
    sum.link += phases.link;
    sum.device += phases.device;
  }
  const n = steps.length;
  return { scheduler: sum.scheduler / n, link: sum.link / n, device: sum.device / n };
}
