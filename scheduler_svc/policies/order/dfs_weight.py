"""Depth first through the prefix tree, the child with most waiting requests below it first (SGLang `dfs-weight`):
what shares a prefix is served together while the prefix is cached.

The tree is that of the matches of waiting requests, kept as they come, go and change: O(matched blocks) each, and a
pass visits only what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.request import TOKEN_BYTES
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.options import Positive


class Node:
    __slots__ = ("children", "requests", "weight")

    def __init__(self) -> None:
        self.children: dict[bytes, Node] = {}
        self.requests: dict[int, RequestView] = {}  # that match up to here and no further, by seniority
        self.weight = 0  # requests here and below


class DepthFirstByWeight(OrderPolicy):
    def __init__(self, stride_tokens: Positive = 16) -> None:
        """`stride_tokens`: the grain at which prefixes are told apart; the block size is the natural one."""
        self._stride_bytes = stride_tokens * TOKEN_BYTES
        self._root = Node()
        self._paths: dict[int, list[bytes]] = {}

    def _path(self, request: RequestView) -> list[bytes]:
        matched_bytes, stride = request.best_matched_tokens * TOKEN_BYTES, self._stride_bytes
        tokens = request.token_ids
        return [tokens[i : i + stride] for i in range(0, matched_bytes - stride + 1, stride)]

    def add(self, request: RequestView) -> None:
        path = self._paths[request.seniority] = self._path(request)
        node = self._root
        node.weight += 1
        for key in path:
            node = node.children.setdefault(key, Node())
            node.weight += 1
        node.requests[request.seniority] = request

    def remove(self, request: RequestView) -> None:
        node = self._root
        node.weight -= 1
        for key in self._paths.pop(request.seniority):
            child = node.children[key]
            child.weight -= 1
            if not child.weight:
                del node.children[key]
            node = child
        del node.requests[request.seniority]

    def rematched(self, request: RequestView) -> None:
        if len(self._paths[request.seniority]) != request.best_matched_tokens * TOKEN_BYTES // self._stride_bytes:
            self.remove(request)
            self.add(request)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        stack: list[Node | RequestView] = [self._root]
        while stack:
            top = stack.pop()
            if not isinstance(top, Node):
                yield top
                continue
            own = sorted(top.requests.values(), key=lambda request: (request.place, request.seniority))
            stack += reversed(own)  # after everything below
            children = sorted(top.children.values(), key=lambda child: child.weight)
            stack += children
