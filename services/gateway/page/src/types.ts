/** The JSON of /v1/live, /v1/requests/{id}/timeline and /v1/policies. live.proto and cache.proto in protos/paceline/v1
 * say what the fields of scheduler and cache mean, /openapi.json what the others mean. */

export interface Percentiles {
  p50: number | null;
  p90: number | null;
  p99: number | null;
}

export interface GatewayFigures {
  ready: boolean;
  draining: boolean;
  model: string;
  live_requests: number;
  prompt_tokens: number;
  generation_tokens: number;
  tokens_per_s: number;
  window_s: number;
  ttft_s: Percentiles;
  itl_s: Percentiles;
  e2e_s: Percentiles;
  event_loop_lag_s: Percentiles;
}

export interface Load {
  num_running: number;
  num_waiting: number;
  num_waiting_tokens: number;
  waiting_s: number;
  num_blocks: number;
  num_used_blocks: number;
  block_size: number;
  num_slots: number;
  num_preemptions: number;
  prefix_query_tokens: number;
  prefix_hit_tokens: number;
}

export const KINDS = ["order", "capacity", "batch", "preemption", "placement"] as const;
export type Kind = (typeof KINDS)[number];
export type Policies = { preset: string } & Record<Kind, string>;

export interface WorkerShown {
  worker: number;
  name: string;
  num_slots: number;
  num_running: number;
  num_prefilling: number;
  num_offline: number;
  num_blocks: number;
  num_available_blocks: number;
  num_free_host_blocks: number;
  num_swapped_out: number;
  in_flight: number;
  window: number;
  draining: boolean;
  base_s: number;
  token_s: number;
  context_s: number;
  row_s: number;
}

export interface TenantShown {
  tenant: string;
  running_tokens: number;
  waiting_tokens: number;
}

export interface Step {
  worker: number;
  step: number;
  planned_s: number;
  sent_s: number;
  ended_s: number;
  computed_s: number;
  num_decodes: number;
  num_prefills: number;
  new_tokens: number;
  context_tokens: number;
}

export interface SequenceShown {
  request_id: string;
  answer_id: string;
  tenant: string;
  reason: string;
  detail: string;
  arrived_s: number;
  since_s: number;
}

export interface SchedulerView {
  at_s: number;
  epoch: number;
  load: Load;
  policies: Policies;
  failed_policies: string[];
  cache_connected: boolean;
  num_sessions: number;
  num_offline_running: number;
  num_offline_waiting: number;
  num_finished: number;
  num_rejected: number;
  num_generated_tokens: number;
  num_steps: number;
  num_failures: number;
  core_s: number;
  workers: WorkerShown[];
  tenants: TenantShown[];
  num_tenants: number;
  steps: Step[];
  num_missed_steps: number;
  sequences: SequenceShown[];
  num_live_sequences: number;
}

/**
 * `cells`: "." free, "c" cached, "u" used by one sequence, "s" shared by several, "p" pinned. A cell of several blocks
 * shows the state that comes last in this list.
 */
export interface BlockMap {
  worker: number;
  name: string;
  num_blocks: number;
  blocks_per_cell: number;
  cells: string;
  num_host_blocks: number;
  host_blocks_per_cell: number;
  host_cells: string;
}

export interface TreeNode {
  id: number;
  parent: number | null;
  tenant: string;
  num_tokens: number;
  num_blocks: number;
  workers: number[];
  num_users: number;
  num_hits: number;
  saved_tokens: number;
  age_s: number;
  pinned: boolean;
}

export interface CacheView {
  num_workers: number;
  prefix_hit_tokens: number;
  prefix_query_tokens: number;
  maps: BlockMap[];
  tree: { nodes: TreeNode[]; num_nodes: number; num_tokens: number };
}

export interface ServiceShown {
  kind: "gateway" | "scheduler" | "cache" | "worker";
  name: string;
  state: "ready" | "starting" | "down" | "draining";
  num_restarts: number | null;
  up_s: number | null;
}

export interface LiveSnapshot {
  at_s: number;
  gateway: GatewayFigures;
  scheduler: SchedulerView | null;
  cache?: CacheView | null;
  services?: ServiceShown[];
}

export interface TimelineSpan {
  reason: string;
  detail: string;
  behind: string | null;
  worker: number | null;
  from_s: number;
  to_s: number;
  first_decision: number;
  last_decision: number;
}

export type MissReason = "block_border" | "new" | "evicted" | "other_worker" | "in_flight" | "whole_prompt";

export interface PrefixShown {
  prompt_tokens: number;
  cached_tokens: number;
  missed: { reason: MissReason; num_tokens: number; detail: string }[];
}

export interface SequenceTimeline {
  request_id: string;
  spans: TimelineSpan[];
  prefix?: PrefixShown | null;
}

export interface TimelineAnswer {
  id: string;
  num_sequences: number;
  sequences: SequenceTimeline[];
}

export interface PoliciesAnswer {
  preset: string;
  policies: Record<Kind, string>;
  options: Record<string, unknown>;
  presets: string[];
  known: Record<Kind, string[]>;
  /** Why this caller may not set them, and what to do; null if it may. */
  why_not_settable: string | null;
}
