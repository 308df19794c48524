/** Snapshots for tests. */

import type { LiveSnapshot, SchedulerView, Step, TreeNode } from "../src/types.ts";

const NONE = { p50: null, p90: null, p99: null };

export function step(change: Partial<Step> = {}): Step {
  return {
    worker: 1,
    step: 1,
    planned_s: 100,
    sent_s: 100.002,
    ended_s: 100.03,
    computed_s: 0.02,
    num_decodes: 1,
    num_prefills: 0,
    new_tokens: 0,
    context_tokens: 10,
    ...change,
  };
}

export function view(change: Partial<SchedulerView> = {}): SchedulerView {
  return {
    at_s: 100,
    epoch: 1,
    load: {
      num_running: 3,
      num_waiting: 2,
      num_waiting_tokens: 20,
      waiting_s: 0.5,
      num_blocks: 100,
      num_used_blocks: 40,
      block_size: 16,
      num_slots: 8,
      num_preemptions: 5,
      prefix_query_tokens: 200,
      prefix_hit_tokens: 50,
    },
    policies: {
      preset: "paceline",
      order: "fair",
      capacity: "watermark",
      batch: "decode-first",
      preemption: "largest-share",
      placement: "predicted-time",
    },
    failed_policies: [],
    cache_connected: true,
    num_sessions: 1,
    num_offline_running: 0,
    num_offline_waiting: 0,
    num_finished: 0,
    num_rejected: 0,
    num_generated_tokens: 0,
    num_steps: 0,
    num_failures: 0,
    core_s: 0,
    workers: [],
    tenants: [],
    num_tenants: 0,
    steps: [],
    num_missed_steps: 0,
    sequences: [],
    num_live_sequences: 0,
    ...change,
  };
}

export function snapshot(atS: number, scheduler: SchedulerView | null): LiveSnapshot {
  return {
    at_s: atS,
    gateway: {
      ready: scheduler !== null,
      draining: false,
      model: "m",
      live_requests: 2,
      prompt_tokens: 0,
      generation_tokens: 0,
      tokens_per_s: 12.5,
      window_s: 10,
      ttft_s: NONE,
      itl_s: { p50: 0.01, p90: 0.02, p99: 0.03 },
      e2e_s: NONE,
      event_loop_lag_s: NONE,
    },
    scheduler,
    cache: null,
    services: [],
  };
}

export function node(id: number, parent: number | null, change: Partial<TreeNode> = {}): TreeNode {
  return {
    id,
    parent,
    tenant: "",
    num_tokens: 16,
    num_blocks: 1,
    workers: [1],
    num_users: 0,
    num_hits: 0,
    saved_tokens: 0,
    age_s: 1,
    pinned: false,
    ...change,
  };
}
