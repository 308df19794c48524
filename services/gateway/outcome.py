"""How one sequence ended: what the metrics count and the log line tells."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class SequenceOutcome:
    """Times are in seconds; None where a time is not known, or the event never happened."""

    request_id: str
    answer_id: str
    endpoint: str
    sample: int  # which of several of one prompt
    tenant: str
    finish_reason: str  # stop, length, abort (its client has gone) or error
    status: int  # of HTTP, also over gRPC; 499 for an abort
    message: str  # of an error
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ttft_s: float | None  # from the arrival of the request to its first token
    tpot_s: float | None  # between the first and the last token, for each token after the first
    latency_s: float  # from the arrival of the request to the end of this sequence
    timing: inference_pb2.RequestTiming | None  # as the scheduler says; None if it has not said
    num_submissions: int  # to a scheduler; more than 1 if the scheduler was lost
