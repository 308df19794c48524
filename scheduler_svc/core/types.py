"""What goes into the scheduler's core, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.v1.cache_pb2 import CacheServiceLinkRequest
from paceline.v1.inference_pb2 import SessionResponse
from paceline.v1.worker_pb2 import WorkerServiceLinkResponse


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    window: int = 2
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    stall_s: float = 1.5  # that a plan may be on its way, and a step be late beyond what its worker allows it
    poison_failures: int = 2  # a request is failed that was alone in so many failures in a row
    prefix_caching: bool = True
    partial_reuse: bool = True  # of the beginning of a cached block
    host_cache: bool = True  # what is evicted is kept in the workers' host memory
    max_num_seqs: int = 0  # running on one worker; 0: as many as the worker has slots
    tenant_max_running_tokens: int = 0  # that one tenant's running requests may grow to; 0: any
    tenant_max_queued_tokens: int = 0
    waiting_timeout_s: float = 0.0  # until a request first runs; 0: for ever
    running_timeout_s: float = 0.0  # from then until it ends, runs it or not (but while there is no worker)
    no_worker_timeout_s: float = 30.0  # that a request waits while no worker is attached; 0: for ever
    allow_mixed_dtypes: bool = False  # workers of one model may serve it in other types: the same tokens no more
    stuck_decisions: int = 40  # so often may an idle system refuse its queue before the first of it is failed


@dataclass(frozen=True, slots=True)
class Failure:
    """Steps of a worker have failed, or it was lost in them."""

    worker: int  # 0: it is not about the last one alone
    what: str
    requests: list[str]  # that were in them and are retried
    poisoned: str = ""  # the one that will not be


@dataclass(slots=True)
class Outbox:
    to_cache: list[CacheServiceLinkRequest] = field(default_factory=list)
    to_workers: list[tuple[int, WorkerServiceLinkResponse]] = field(default_factory=list)
    to_sessions: list[tuple[str, SessionResponse]] = field(default_factory=list)
    lost_workers: list[tuple[int, str]] = field(default_factory=list)  # whose links are to be closed, and why
    failures: list[Failure] = field(default_factory=list)  # for the log


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, for the metrics."""

    accepted: int = 0
    rejected: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    preempted: int = 0
    swapped_out: int = 0  # of those preempted
    swapped_in: int = 0
    steps: int = 0
    empty_steps: int = 0  # composed after a preemption, with nothing in them
    policy_errors: int = 0
    requeued: int = 0
    failures: int = 0  # of workers that reported a failed step, or were lost in one
    retried: int = 0  # requests that were in these
    poisoned: int = 0  # of these, found guilty
    restored: int = 0  # that a new cache took over as they were, after the one before was lost
    refused_claims: int = 0  # that it did not
