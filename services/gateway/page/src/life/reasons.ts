/** What a reason of the timeline means for colours: the request runs, waits, is preempted or requeued, or has ended. */

const RUNS = new Set(["running", "cleared", "drafts"]);
const SET_BACK = new Set(["preempted", "requeued", "held"]);

export type ReasonClass = "runs" | "waits" | "back" | "ended";

export function reasonClass(reason: string): ReasonClass {
  if (RUNS.has(reason)) return "runs";
  if (reason === "ended") return "ended";
  return SET_BACK.has(reason) ? "back" : "waits"; // blocks, slots, order, budget, tenant, …
}
