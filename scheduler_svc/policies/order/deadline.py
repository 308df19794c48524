"""Earliest deadline first (Liu and Layland 1973); without a deadline last. A request whose deadline has passed is
failed by the scheduler whatever the order. One that waits and cannot get its first token in time any more is given up
here: at the best rate at which prompts have been taken up, its own would take longer than there is time.

That rate says what can be done only if there was always something to do, so it is measured while somebody waits all the
time. Before there has been such a time nobody is given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scheduler_svc.core.policy import KeyedOrder
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.options import Amount

# Over such a time, at least, the rate is measured.
WINDOW_S = 1.0


class EarliestDeadlineFirst(KeyedOrder):
    def __init__(self, prefill_tokens_per_s: Amount = 0.0) -> None:
        """`prefill_tokens_per_s`: how fast a prompt is computed at best; 0: the best that was seen so far, while
        somebody always waited."""
        super().__init__()
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._best_tokens_per_s = 0.0
        self._began_s = math.nan  # the measurement: since then somebody has always waited
        self._begun_tokens = 0

    def key(self, request: RequestView) -> float:
        return request.deadline_s

    def remove(self, request: RequestView) -> None:
        super().remove(request)
        if not self._entries:
            self._began_s = math.nan

    def started(self, request: RequestView) -> None:
        self._begun_tokens += _uncached_tokens(request)

    def hopeless(self, now_s: float) -> Iterator[RequestView]:
        rate = self.prefill_tokens_per_s or self._measure(now_s)
        for request in super().ordered(now_s) if rate else ():
            if request.deadline_s == math.inf:
                return
            if now_s + _uncached_tokens(request) / rate > request.deadline_s:
                yield request

    def _measure(self, now_s: float) -> float:
        if not self._entries:
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
