"""Earliest deadline first (Liu and Layland 1973); without a deadline last. A request whose deadline has passed is
failed by the scheduler whatever the order. One that waits and cannot get its first token in time any more is given up
here: at the best rate at which prompts have been taken up, its own would take longer than there is time.

That rate says what can be done only while prompts are what takes the time. So it is measured while somebody waits and
some prompt is being computed, both all the time: a queue that is empty now and then shows what was asked for, and one
that stands still while everything decodes shows what seats there are. Before there is a measurement nobody is given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from scheduler_svc.core.policy.order import KeyedOrder
from scheduler_svc.core.requests.request import RequestView
from scheduler_svc.policies.options import Amount

# Over such a time, at least, the rate is measured.
WINDOW_S = 1.0


class EarliestDeadlineFirst(KeyedOrder):
    key_is_constant: ClassVar[bool] = True

    def __init__(self, prefill_tokens_per_s: Amount = 0.0) -> None:
        """`prefill_tokens_per_s`: how fast a prompt is computed at best; 0: the best that was measured so far."""
        super().__init__()
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._best_tokens_per_s = 0.0
        self._began_s = math.nan  # the measurement
        self._begun_tokens = 0
        # What runs and has not generated anything since it began, with its output tokens then; by arrival_index.
        self._computing: dict[int, tuple[RequestView, int]] = {}

    def key(self, request: RequestView) -> float:
        return request.deadline_s

    def remove(self, request: RequestView) -> None:
        super().remove(request)
        if not self._entries:
            self._began_s = math.nan

    def started(self, request: RequestView) -> None:
        self._begun_tokens += _uncached_tokens(request)
        self._computing[request.arrival_index] = request, request.num_output_tokens

    def stopped(self, request: RequestView) -> None:
        self._computing.pop(request.arrival_index, None)

    def hopeless(self, now_s: float) -> Iterator[RequestView]:
        rate = self.prefill_tokens_per_s or self._measure(now_s)
        for request in super().ordered(now_s) if rate else ():
            if request.deadline_s == math.inf:
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
