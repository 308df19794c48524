"""How a request has fared so far."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1.inference_pb2 import RequestTiming


@dataclass(slots=True)
class History:
    """Times are on the scheduler's clock."""

    has_run: bool = False
    started_s: float | None = None  # first admission; of a beam: that of its search
    first_token_s: float | None = None  # of a beam search: the end of its first step
    cached_tokens: int | None = None  # reused at the first admission
    num_preemptions: int = 0

    def timing(self, arrival_s: float, now_s: float) -> RequestTiming:
        """The times of the request's phases, if it ends now."""
        started_s = now_s if self.started_s is None else self.started_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return RequestTiming(
            queue_s=started_s - arrival_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
            num_preemptions=self.num_preemptions,
        )

    def ran_s(self, now_s: float) -> float:
        """Seconds since the request first ran."""
        return 0.0 if self.started_s is None else now_s - self.started_s
