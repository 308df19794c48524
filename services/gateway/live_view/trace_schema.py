"""The JSON of a trace's records. Trace in protos/paceline/v1/live.proto says what the scheduler's fields mean. Fields
that end in `_us` are microseconds, each of the clock of its service."""

from __future__ import annotations

from pydantic import BaseModel


class StepTrace(BaseModel):
    """A step. `received_us` to `result_sent_us` are of the worker's clock, and 0 if they are not known."""

    worker: int
    name: str
    step: int
    planned_us: int
    sent_us: int
    ended_us: int
    received_us: int
    started_us: int
    finished_us: int
    result_sent_us: int
    num_decodes: int
    num_prefills: int
    new_tokens: int
    context_tokens: int


class ExchangeTrace(BaseModel):
    """An exchange with the cache. `received_us` and `answered_us` are of the cache's clock, and 0 if not known."""

    sent_us: int
    ended_us: int
    received_us: int
    answered_us: int
    num_ops: int


class RunTrace(BaseModel):
    """An event in the scheduler. The scheduler applies the event, and then plans what it can."""

    began_us: int
    applied_us: int
    ended_us: int
    event: str
    num_plans: int
    num_exchanges: int


class SchedulerTrace(BaseModel):
    """`asked_us` and `got_us` are of the gateway's clock: when the gateway asked for the scheduler's
    part of this record, and when that part came."""

    asked_us: int
    received_us: int
    sent_us: int
    got_us: int
    epoch: int
    steps: list[StepTrace]
    exchanges: list[ExchangeTrace]
    runs: list[RunTrace]
    num_missed: int


class MessageTrace(BaseModel):
    """A message of the scheduler with tokens or endings."""

    received_us: int
    ended_us: int
    num_tokens: int


class WrittenTrace(BaseModel):
    """A group of tokens that left for clients, with less than 0.5 ms between one and the next."""

    began_us: int
    ended_us: int
    num_tokens: int


class EndedTrace(BaseModel):
    """A sequence that has ended. `latency_s`, `queue_s` and `ttft_s` are seconds. A field is null if its value is not
    known."""

    request_id: str
    answer_id: str
    endpoint: str
    tenant: str
    finish_reason: str
    ended_us: int
    latency_s: float
    queue_s: float | None
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int


class GatewayTrace(BaseModel):
    """What the gateway recorded until `at_us`."""

    at_us: int
    messages: list[MessageTrace]
    written: list[WrittenTrace]
    requests: list[EndedTrace]


class TraceRecord(BaseModel):
    """What has ended since the record before. `scheduler` is null while there is no connection to it."""

    gateway: GatewayTrace
    scheduler: SchedulerTrace | None
