"""The JSON of the live view and of a request's timeline. protos/paceline/v1/live.proto says what the scheduler's fields
mean."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.gateway.live_view.cache_schema import CacheView


class Percentiles(BaseModel):
    """In seconds; null without an observation."""

    p50: float | None
    p90: float | None
    p99: float | None


class GatewayFigures(BaseModel):
    """The figures of this gateway. Rates and percentiles are those of the last `window_s` seconds. `prompt_tokens` and
    `generation_tokens` are counts since the gateway's start."""

    ready: bool
    draining: bool
    model: str
    live_requests: int
    prompt_tokens: int
    generation_tokens: int
    tokens_per_s: float
    window_s: float
    ttft_s: Percentiles
    itl_s: Percentiles
    e2e_s: Percentiles
    event_loop_lag_s: Percentiles


class LoadShown(BaseModel):
    """The load by online requests, over all workers. The last three fields are counts since the scheduler's start."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    waiting_s: float
    num_blocks: int
    num_used_blocks: int
    block_size: int
    num_slots: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


class CurrentPolicies(BaseModel):
    """`preset` is empty if the policies are those of no preset."""

    preset: str
    order: str
    capacity: str
    batch: str
    preemption: str
    placement: str


class WorkerShown(BaseModel):
    """A worker. The four last fields are the fitted model of its step times, in seconds."""

    worker: int
    name: str
    num_slots: int
    num_running: int
    num_prefilling: int
    num_offline: int
    num_blocks: int
    num_available_blocks: int
    num_free_host_blocks: int
    num_swapped_out: int
    in_flight: int
    window: int
    draining: bool
    base_s: float
    token_s: float
    context_s: float
    row_s: float


class TenantShown(BaseModel):
    """A tenant: tokens that its running requests may grow to, and known tokens of its waiting requests."""

    tenant: str
    running_tokens: int
    waiting_tokens: int


class StepShown(BaseModel):
    """A step that has ended. Unix times at the scheduler, and how long the worker computed."""

    worker: int
    step: int
    planned_s: float
    sent_s: float
    ended_s: float
    computed_s: float
    num_decodes: int
    num_prefills: int
    new_tokens: int
    context_tokens: int


class SequenceShown(BaseModel):
    """A sequence of a request, and the last entry of its timeline: `reason` is waiting, running, preempted, ended, …
    `arrived_s` and `since_s` are the Unix times of the sequence's arrival and of the beginning of this entry."""

    request_id: str
    answer_id: str
    tenant: str
    reason: str
    detail: str
    arrived_s: float
    since_s: float


class SchedulerView(BaseModel):
    """The scheduler. `num_finished` to `num_failures` are counts since its start. `core_s` is the time that events
    and steps have taken in its core since then."""

    at_s: float
    epoch: int
    load: LoadShown
    policies: CurrentPolicies
    failed_policies: list[str]
    cache_connected: bool
    num_sessions: int
    num_offline_running: int
    num_offline_waiting: int
    num_finished: int
    num_rejected: int
    num_generated_tokens: int
    num_steps: int
    num_failures: int
    core_s: float
    workers: list[WorkerShown]
    tenants: list[TenantShown]
    num_tenants: int
    steps: list[StepShown]
    num_missed_steps: int
    sequences: list[SequenceShown]
    num_live_sequences: int


class ServiceShown(BaseModel):
    """A service that this gateway knows. `num_restarts`: restarts of the service that the gateway has seen since the
    gateway's start; null if the gateway cannot see them. `up_s`: how long the service has been up, as far as the
    gateway knows; null while the service is not up, or if the gateway does not know."""

    kind: Literal["gateway", "scheduler", "cache", "worker"]
    name: str
    state: Literal["ready", "starting", "down", "draining"]
    num_restarts: int | None
    up_s: float | None


class LiveSnapshot(BaseModel):
    """What the server does. `scheduler` and `cache` are null while there is no connection to them."""

    at_s: float
    gateway: GatewayFigures
    scheduler: SchedulerView | None
    cache: CacheView | None
    services: list[ServiceShown]


class TimelineSpan(BaseModel):
    """One reason, from `from_s` to `to_s` after the request's arrival. `behind`: the waiting request
    before it in the queue; null if there was none, and if the caller may not see other requests. `worker`: the worker
    that it waited for or ran on; null for several workers or none."""

    reason: str
    detail: str
    behind: str | None
    worker: int | None
    from_s: float
    to_s: float
    first_decision: int
    last_decision: int


MissReason = Literal["other_worker", "in_flight", "evicted", "new", "block_border", "whole_prompt"]


class MissedTokens(BaseModel):
    """Prompt tokens that were not reused, and why."""

    reason: MissReason
    num_tokens: int
    detail: str


class PrefixShown(BaseModel):
    """What the first admission of a sequence found in the prefix cache. `cached_tokens` and the tokens in `missed` add
    up to `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    missed: list[MissedTokens]


class SequenceTimeline(BaseModel):
    """The timeline of one sequence, which is one sample of one prompt. `prefix` is null before the sequence's first
    admission, and without prefix caching."""

    request_id: str
    spans: list[TimelineSpan]
    prefix: PrefixShown | None


class TimelineAnswer(BaseModel):
    """Why a request waited, and what happened to it. At most 64 of its `num_sequences` are shown."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    num_sequences: int
    sequences: list[SequenceTimeline]
