"""The configuration and the output of the scheduler's core."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from paceline.v1.cache_pb2 import CacheServiceLinkRequest
from paceline.v1.inference_pb2 import SessionResponse
from paceline.v1.worker_pb2 import WorkerServiceLinkResponse

# Which requests share cached KV: those of one tenant, or of all tenants.
CacheScope = Literal["tenant", "server"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of the core."""

    window: int = 0  # steps in flight per worker; 0: as the worker asks, if its steps are short, else at most 2
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    max_queued_offline_requests: int = 4096
    max_queued_offline_tokens: int = 4_000_000
    max_offline_tokens: int = 256  # of offline requests, in a step that also has online requests
    # A plan may take this long to reach its worker. A step may take this much longer than twice the time that its
    # worker allows for it. After that the worker counts as lost (progress.py).
    stall_s: float = 1.5
    poison_failures: int = 2  # a request fails after this many failed steps in a row with it as the only row
    prefix_caching: bool = True
    cache_scope: CacheScope = "tenant"
    partial_reuse: bool = True  # reuse the beginning of a cached block
    host_cache: bool = True  # keep evicted KV in the workers' host memory
    max_num_seqs: int = 0  # running on one worker; 0: as many as the worker has slots
    tenant_max_running_tokens: int = 0  # tokens that one tenant's running requests may grow to; 0: no limit
    tenant_max_queued_tokens: int = 0
    waiting_timeout_s: float = 0.0  # until an online request first runs; 0: no limit
    running_timeout_s: float = 0.0  # from an online request's first run; checked only while a worker is attached
    conversation_ttl_s: float = 300.0  # how long an idle conversation keeps its blocks and queue position
    no_worker_timeout_s: float = 30.0  # how long a request waits while no attached worker can hold it; 0: no limit
    allow_mixed_dtypes: bool = False  # workers of one model may use different data types; tokens may then differ
    # Speculative decoding: draft tokens of one row in a step, at most; 0: none. Workers have to support it.
    speculative_tokens: int = 0
    speculative_max_rows: int = 8  # if more sequences run on a worker, none of them speculates
    # A draft is what followed the last tokens when they occurred before. The longest and the shortest run of last
    # tokens that is looked up:
    speculative_ngram_max: int = 4
    speculative_ngram_min: int = 2
    # While nothing runs: after this many decisions per worker that admit no request, the first waiting request fails.
    stuck_decisions: int = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """Steps of a worker have failed, or the worker was lost in them."""

    worker: int  # 0: no worker failed just now; a held request was found poisoned (suspects.py)
    what: str
    requests: list[str]  # ids of the requests in these steps that are retried
    poisoned: str = ""  # id of the request that is not retried
    traces: list[str] = field(default_factory=list)  # trace ids of all these requests, each once


@dataclass(slots=True)
class Outbox:
    """The messages that the core wants to send, by receiver."""

    to_cache: list[CacheServiceLinkRequest] = field(default_factory=list)
    to_workers: list[tuple[int, WorkerServiceLinkResponse]] = field(default_factory=list)
    to_sessions: list[tuple[str, SessionResponse]] = field(default_factory=list)
    lost_workers: list[tuple[int, str]] = field(default_factory=list)  # worker and reason: their links are to be closed
    failures: list[Failure] = field(default_factory=list)  # for the log


# Upper edges of the buckets of StepTokens: vLLM's, for `vllm:iteration_tokens_total`.
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


@dataclass(slots=True)
class StepTokens:
    """A histogram of steps by their tokens: prompt tokens computed, tokens sampled, draft tokens."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    total: int = 0

    def observe(self, num_tokens: int) -> None:
        """Count a step."""
        self.counts[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self.total += num_tokens


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, for the metrics."""

    accepted: int = 0
    rejected: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    preempted: int = 0
    swapped_out: int = 0  # of the preempted ones
    swapped_in: int = 0
    steps: int = 0
    empty_steps: int = 0  # scheduled after a preemption, with no rows
    policy_errors: int = 0
    requeued: int = 0
    failures: int = 0  # workers that reported a failed step, or were lost in a step
    retried: int = 0  # requests in these steps that were retried
    poisoned: int = 0  # requests in these steps that were found poisoned
    restored: int = 0  # requests that a new cache took over after the previous one was lost
    refused_restores: int = 0  # requests that it did not take over
    prefix_query_tokens: int = 0  # looked up in the prefix cache at first admissions
    prefix_hit_tokens: int = 0  # of these, with reused KV
    num_drafts: int = 0  # draft rows with a result
    num_draft_tokens: int = 0  # draft tokens in these rows
    num_accepted_tokens: int = 0  # of these, the tokens that were accepted
    step_tokens: StepTokens = field(default_factory=StepTokens)
