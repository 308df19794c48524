"""Depth first through the prefix tree; the child with most waiting requests below it comes first (SGLang `dfs-weight`).
So requests that share a prefix are served together while the prefix is cached. Of children with equal weight, the child
with the oldest request comes first, so that a new branch does not pass an old one of the same weight.

The tree holds the matches of waiting requests and is updated as they come, go and change: O(matched blocks) each. A
pass sorts the children of the nodes that it visits, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from scheduler_svc.core.requests.request import TOKEN_BYTES
from scheduler_svc.policies.api import OrderPolicy, RequestView
from scheduler_svc.policies.options import Positive

# Key of a child: its tokens. On the first level also the namespace, which is the same below.
Key = bytes | tuple[tuple[str, str], bytes]
Age = tuple[int, int]  # queue position and arrival index


class Node:
    """A run of `stride_tokens` tokens that waiting requests have matched, below its parent's tokens."""

    __slots__ = ("children", "oldest", "requests", "weight")

    def __init__(self) -> None:
        self.children: dict[Key, Node] = {}
        self.requests: dict[int, RequestView] = {}  # that match up to here and no further, by arrival index
        self.weight = 0  # requests here and below
        self.oldest: Age | None = None  # age of the oldest of these; None: unknown


class DepthFirstByWeight(OrderPolicy):
    """Orders by a depth-first walk through the tree of matched prefixes, heaviest child first."""

    def __init__(self, stride_tokens: Positive = 16) -> None:
        """`stride_tokens`: the grain at which prefixes are told apart; the block size is the natural one."""
        self._stride_bytes = stride_tokens * TOKEN_BYTES
        self._root = Node()
        self._paths: dict[int, list[Key]] = {}

    def _path(self, request: RequestView) -> list[Key]:
        matched_bytes, stride = request.best_matched_tokens * TOKEN_BYTES, self._stride_bytes
        tokens = request.token_ids
        path: list[Key] = [tokens[i : i + stride] for i in range(0, matched_bytes - stride + 1, stride)]
        if path:
            path[0] = request.namespace, tokens[:stride]
        return path

    def add(self, request: RequestView) -> None:
        """Add a request at the end of its matched prefix."""
        path, age = self._path(request), _age(request)
        node = self._root
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node()
                child.oldest = age
            elif child.oldest is not None and age < child.oldest:
                child.oldest = age
            child.weight += 1
            node = child
        node.requests[request.arrival_index] = request
        self._paths[request.arrival_index] = path

    def remove(self, request: RequestView) -> None:
        """Remove a request, and the nodes that no other request needs."""
        node, age = self._root, _age(request)
        for key in self._paths.pop(request.arrival_index):
            child = node.children[key]
            if child.oldest == age:
                child.oldest = None
            child.weight -= 1
            if not child.weight:
                del node.children[key]
            node = child
        del node.requests[request.arrival_index]

    def rematched(self, request: RequestView) -> None:
        """Move the request if its match has grown or shrunk by a stride."""
        if len(self._paths[request.arrival_index]) != request.best_matched_tokens * TOKEN_BYTES // self._stride_bytes:
            self.remove(request)
            self.add(request)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Requests of a subtree before those of its parent; requests of one node by age."""
        stack: list[Node | RequestView] = [self._root]
        while stack:
            top = stack.pop()
            if not isinstance(top, Node):
                yield top
                continue
            own = sorted(top.requests.values(), key=_age, reverse=True)
            stack += own  # after everything below
            children = list(top.children.values())
            if len(children) > 1:
                for child in children:
                    if child.oldest is None:
                        _find_oldest(child)
                children.sort(key=attrgetter("oldest"), reverse=True)
                children.sort(key=attrgetter("weight"))
            stack += children


def _age(request: RequestView) -> Age:
    return request.queue_position, request.arrival_index


def _find_oldest(node: Node) -> None:
    """Find the oldest request of the node, and of nodes below it where it is unknown. Not recursive: a path may have
    thousands of nodes."""
    stack = [node]
    while stack:
        top = stack[-1]
        unknown = [child for child in top.children.values() if child.oldest is None]
        if unknown:
            stack += unknown
            continue
        stack.pop()
        ages = [child.oldest for child in top.children.values() if child.oldest is not None]
        top.oldest = min(ages + [_age(request) for request in top.requests.values()])
