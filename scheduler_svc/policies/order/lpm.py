"""Longest cached prefix first (SGLang `lpm`), with its in-batch rule: of requests that share a prefix which is not
computed yet, one goes first and the others wait behind everything else, so that they find the prefix cached.

SGLang matches every waiting request again in every pass, and builds a tree of those that match little; above 128
waiting requests it falls back to fcfs. Here a request is matched on arrival, and moves when the cache reports a change.
Groups replace the tree: requests of one namespace with the same first `in_batch_deprioritize_threshold` tokens. The
first request of a group leads it, and the rest are deprioritised. Every operation is O(log waiting).
"""

from __future__ import annotations

from sortedcontainers import SortedDict

from scheduler_svc.core.requests.request import TOKEN_BYTES
from scheduler_svc.policies.api import KeyedOrder, RequestView
from scheduler_svc.policies.options import AtLeastMinusOne, Count

# What the requests of a group have in common: the namespace and the first tokens.
Beginning = tuple[tuple[str, str], bytes]


class LongestPrefixMatch(KeyedOrder):
    """Orders by cached tokens, most first; requests that wait for a common beginning come last."""

    def __init__(
        self, in_batch_check_threshold: AtLeastMinusOne = 32, in_batch_deprioritize_threshold: Count = 32
    ) -> None:
        """Requests with at most `in_batch_check_threshold` cached tokens are compared with one another; -1: none."""
        super().__init__()
        self.check_threshold = in_batch_check_threshold
        self.beginning_bytes = max(1, in_batch_deprioritize_threshold) * TOKEN_BYTES
        self._groups: dict[Beginning, SortedDict[tuple[int, int], RequestView]] = {}
        self._group_of: dict[int, Beginning] = {}  # by arrival index

    def key(self, request: RequestView) -> tuple[bool, int]:
        """(True, 0) if another request leads its group; else (False, minus its cached tokens)."""
        beginning = self._group_of.get(request.arrival_index)
        group = None if beginning is None else self._groups.get(beginning)
        follows = group is not None and group.peekitem(0)[1] != request
        return (True, 0) if follows else (False, -request.best_matched_tokens)

    def add(self, request: RequestView) -> None:
        """Add a request, and put it into the group of its beginning if little of it is cached."""
        tokens = request.token_ids[: self.beginning_bytes]
        if request.best_matched_tokens <= self.check_threshold and len(tokens) == self.beginning_bytes:
            beginning = request.namespace, tokens
            group = self._groups.setdefault(beginning, SortedDict())
            led_before = group.peekitem(0)[1] if group else None
            group[request.queue_position, request.arrival_index] = request
            self._group_of[request.arrival_index] = beginning
            if led_before is not None and group.peekitem(0)[1] == request:  # the request now leads its group
                super().rematched(led_before)
        super().add(request)

    def remove(self, request: RequestView) -> None:
        """Remove a request. If it led its group, the next request leads the group."""
        super().remove(request)
        beginning = self._group_of.pop(request.arrival_index, None)
        if beginning is None:
            return
        group = self._groups[beginning]
        led = group.peekitem(0)[1] == request
        del group[request.queue_position, request.arrival_index]
        if not group:
            del self._groups[beginning]
        elif led:
            super().rematched(group.peekitem(0)[1])

    def rematched(self, request: RequestView) -> None:
        """The request may enter or leave its group, and then its group may get another leader."""
        grouped = request.arrival_index in self._group_of
        if grouped == (request.best_matched_tokens <= self.check_threshold):
            super().rematched(request)
        else:
            self.remove(request)
            self.add(request)
