"""The worker's Prometheus series."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from gpu_worker.steps.launched import StepStats
from paceline.v1.worker_pb2 import StepResult

_STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

STEP_SECONDS = Histogram("paceline_worker_step_seconds", "Duration of a step", buckets=_STEP_BUCKETS_S)
TOKENS = Counter("paceline_worker_tokens", "Tokens computed", ["phase"])
BATCH_SIZE = Gauge("paceline_worker_batch_size", "Sequences in the last step")
KV_BLOCKS = Gauge("paceline_worker_kv_blocks", "Usable blocks of the KV pool")
KV_TABLE_BLOCKS = Gauge(
    "paceline_worker_kv_table_blocks", "Entries of the block tables; shared blocks count repeatedly"
)
LINK_UP = Gauge("paceline_worker_link_up", "1 while registered with the scheduler")
LINK_FAILURES = Counter("paceline_worker_link_failures", "Links that ended other than by a release")
FAILED_STEPS = Counter("paceline_worker_failed_steps", "Steps that raised or were overdue")

_DECODE, _PREFILL, _DRAFT = (TOKENS.labels(phase) for phase in ("decode", "prefill", "draft"))


def record_step(result: StepResult, stats: StepStats) -> None:
    STEP_SECONDS.observe((result.finished_us - result.started_us) / 1e6)
    BATCH_SIZE.set(stats.sequences)
    KV_TABLE_BLOCKS.set(stats.table_blocks)
    if stats.decode_tokens:
        _DECODE.inc(stats.decode_tokens)
    if stats.prefill_tokens:
        _PREFILL.inc(stats.prefill_tokens)
    if stats.draft_tokens:
        _DRAFT.inc(stats.draft_tokens)
