"""Earliest deadline first (Liu and Layland 1973); without a deadline last. A request whose deadline has passed is
failed by the scheduler whatever the order; one that cannot get its first token in time any more is let go of here: it
stands behind all that can still be served.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scheduler_svc.core.policy import KeyedOrder
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.options import Amount


class EarliestDeadlineFirst(KeyedOrder):
    def __init__(self, prefill_tokens_per_s: Amount = 0.0) -> None:
        """`prefill_tokens_per_s`: how fast a prompt is computed at best; 0: not known, nobody is hopeless."""
        super().__init__()
        self.prefill_tokens_per_s = prefill_tokens_per_s

    def key(self, request: RequestView) -> float:
        return request.deadline_s

    def is_hopeless(self, request: RequestView, now_s: float) -> bool:
        if not self.prefill_tokens_per_s:
            return False
        uncached = request.num_tokens - request.best_matched_tokens
        return now_s + uncached / self.prefill_tokens_per_s > request.deadline_s

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        hopeless = []
        for request in super().ordered(now_s):
            if self.is_hopeless(request, now_s):
                hopeless.append(request)
            else:
                yield request
        yield from itertools.chain(hopeless)
