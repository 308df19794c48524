"""An index of requests by shared token prefixes, made for one step or for one placement round."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, TypeVar

from scheduler_svc.core.requests.request import TOKEN_BYTES, Request, RequestView

R = TypeVar("R", Request, RequestView)


class PrefixIndex(Generic[R]):
    """Finds requests that share a block of tokens at a given depth. The cached prefixes of
    the requests usually have the same length, so most lookups ask for the same depth. So the index groups its requests
    by their blocks at a depth only when a lookup asks for this depth."""

    __slots__ = ("_at_depth", "_block_size", "_items")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._items: list[tuple[R, int]] = []
        # By depth in tokens: how many of `_items` are grouped at this depth, and the groups by their block after it.
        self._at_depth: dict[int, tuple[int, dict[bytes, list[tuple[R, int]]]]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: R, num_tokens: int) -> None:
        """Add a request; only its first `num_tokens` tokens count."""
        self._items.append((request, num_tokens))

    def alike(self, request: Request | RequestView, depth: int) -> list[tuple[R, int]]:
        """Requests with the same whole block after `depth` tokens, in insertion order. The tokens before that block and
        the namespace may differ."""
        first, end = depth * TOKEN_BYTES, (depth + self._block_size) * TOKEN_BYTES
        count, by_block = self._at_depth.get(depth, (0, {}))
        for item in self._items[count:]:
            if item[1] >= depth + self._block_size:
                by_block.setdefault(item[0].token_ids[first:end], []).append(item)
        self._at_depth[depth] = len(self._items), by_block
        return by_block.get(request.token_ids[first:end], [])

    def shared_tokens(self, request: Request, depth: int) -> int:
        """Tokens of whole blocks at the beginning of `request` that one of these requests has; at least `depth`."""
        size = self._block_size
        others = ((other, num_tokens // size * size) for other, num_tokens in self.alike(request, depth))
        return longest_shared(request, others, depth, (request.num_tokens - 1) // size * size, size)


def longest_shared(
    request: Request, others: Iterable[tuple[Request | RequestView, int]], low: int, high: int, block_size: int
) -> int:
    """Tokens of whole blocks at the beginning of `request` that one of the others has, too: at least `low`, at most
    `high`. Of each other request, only the given number of first tokens counts."""
    tokens = request.token_ids
    for other, num_tokens in others:
        if low >= high:
            break
        end = min(high, num_tokens)
        if end > low and other.namespace == request.namespace:
            others_tokens = other.token_ids
            if others_tokens.startswith(tokens[: low * TOKEN_BYTES]):
                low = common_blocks(others_tokens, tokens, low, end, block_size)
    return low


def common_blocks(others: bytes, tokens: bytes, low: int, high: int, block_size: int) -> int:
    """Tokens of whole blocks that both have in common: at least `low`, at most `high`."""
    if others.startswith(tokens[: high * TOKEN_BYTES]):  # the common case: all of it
        return high
    lengths = range(high, low, -block_size)
    i = bisect_left(lengths, True, key=lambda n: others.startswith(tokens[: n * TOKEN_BYTES]))
    return lengths[i] if i < len(lengths) else low
