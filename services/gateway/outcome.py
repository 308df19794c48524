"""How one sequence ended, for the metrics and the request log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class SequenceOutcome:
    """Times are in seconds; None if a time is unknown or the event did not happen."""

    request_id: str
    answer_id: str
    endpoint: str
    sample: int  # index among the samples of one prompt
    tenant: str
    finish_reason: str  # stop, length, abort (the client has gone) or error
    status: int  # HTTP status, also for gRPC; 499 for an abort
    message: str  # error message
    queue_limit: Literal["requests", "tokens"] | None  # of the scheduler's queue, if it refused the sequence
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ttft_s: float | None  # from the request's arrival to the first token
    tpot_s: float | None  # mean time per token between the first and the last token
    latency_s: float  # from the request's arrival to the end of this sequence
    timing: inference_pb2.RequestTiming | None  # as reported by the scheduler, if it was
    num_submissions: int  # to a scheduler; more than 1 if a scheduler was lost

    @property
    def cached_host_tokens(self) -> int:
        """The part of `cached_tokens` that was in host memory."""
        return 0 if self.timing is None else min(self.timing.num_cached_host_tokens, self.cached_tokens or 0)
