"""Earliest deadline first (Liu and Layland 1973); requests without a deadline come last. The scheduler fails a request
with a deadline in the past under any order. This order also gives up a waiting request that cannot get its first token
in time any more: at the best measured rate of prompts, its own prompt would take longer than the time left. A goal for
the first token (`ttft_slo_s`) orders like a deadline, and fails no request.

The rate is measured only while prompts are the bottleneck: a request waits all the time, and a prompt is computed all
the time. Otherwise demand or slots would limit the measured rate. No request is given up before the first measurement,
unless the option `prefill_tokens_per_s` gives the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scheduler_svc.policies.api import KeyedOrder, RequestView
from scheduler_svc.policies.options import Amount

WINDOW_S = 1.0  # shortest time over which the rate is measured


class EarliestDeadlineFirst(KeyedOrder):
    """Orders by `deadline_s`, and gives up requests that cannot meet it."""

    key_is_constant = True

    def __init__(self, prefill_tokens_per_s: Amount = 0.0) -> None:
        """`prefill_tokens_per_s`: the best rate at which a prompt is computed. 0: the best rate measured so far."""
        super().__init__()
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._best_tokens_per_s = 0.0
        self._began_s = math.nan  # start of the measurement
        self._begun_tokens = 0
        # By arrival index: the running requests that have generated no token since they started or resumed, and how
        # many output tokens each had then.
        self._computing: dict[int, tuple[RequestView, int]] = {}

    def key(self, request: RequestView) -> float:
        """The deadline in seconds, or the time for the first token (`ttft_slo_s`) if that is earlier, on the clock of
        `arrival_s`; infinity if there is neither. At least `min_slo_s` (of the API key) after the arrival: otherwise a
        client could come before all others with ever shorter goals."""
        return max(min(request.deadline_s, request.first_token_due_s), request.arrival_s + request.min_slo_s)

    def remove(self, request: RequestView) -> None:
        """Remove a request. When no request waits, the measurement of the rate ends."""
        super().remove(request)
        if not self._entries:
            self._began_s = math.nan

    def started(self, request: RequestView) -> None:
        """Count the tokens that the request has to compute, those that no cache has, for the rate."""
        self._begun_tokens += _uncached_tokens(request)
        self._computing[request.arrival_index] = request, request.num_output_tokens

    def stopped(self, request: RequestView) -> None:
        """The request's prompt is not being computed any more."""
        self._computing.pop(request.arrival_index, None)

    def hopeless(self, now_s: float) -> Iterator[RequestView]:
        """Requests with too little time before the deadline for their own prompts. Empty while no rate is known."""
        rate = self.prefill_tokens_per_s or self._measure(now_s)
        for request in super().ordered(now_s) if rate else ():
            if self.key(request) == math.inf:
                return
            if now_s + _uncached_tokens(request) / rate > request.deadline_s:
                yield request

    def _measure(self, now_s: float) -> float:
        for arrival_index, (request, num_output_tokens) in list(self._computing.items()):
            if request.num_output_tokens != num_output_tokens:
                del self._computing[arrival_index]
        if not (self._entries and self._computing):
            self._began_s = math.nan
            return self._best_tokens_per_s
        if math.isnan(self._began_s):
            self._began_s, self._begun_tokens = now_s, 0
        elapsed_s = now_s - self._began_s
        if elapsed_s >= WINDOW_S:
            self._best_tokens_per_s = max(self._best_tokens_per_s, self._begun_tokens / elapsed_s)
            self._began_s, self._begun_tokens = now_s, 0
        return self._best_tokens_per_s


def _uncached_tokens(request: RequestView) -> int:
    return request.num_tokens - request.best_matched_tokens
