"""What one request measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# The error of a request that still ran when Ctrl-C ended the run.
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class RequestRecord:
    """Times in seconds of time.perf_counter(); when the request has ended, they count from the start of its stage.
    Latencies count from the moment when the request was sent."""

    scheduled_s: float  # when the load wanted it to be sent
    sent_s: float
    end_s: float = 0.0  # last piece of text, or the end of the reply
    first_s: float | None = None  # first piece of text
    gaps_s: list[float] = field(default_factory=list)  # between pieces of text
    prompt_tokens: int | None = None  # None: the server does not say
    cached_tokens: int | None = None
    output_tokens: int = 0
    # Whether output_tokens is the server's count. Otherwise it is the number of pieces.
    is_counted: bool = False
    finish_reason: str = ""
    error: str = ""  # the reason of a failure, short and the same for all requests that fail so
    kind: str = "random"  # of the session
    turn: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    @property
    def itl_p99_s(self) -> float | None:
        return float(np.percentile(self.gaps_s, 99)) if self.gaps_s else None

    @property
    def late_s(self) -> float:
        """How much later than planned this program sent the request."""
        return max(0.0, self.sent_s - self.scheduled_s)
