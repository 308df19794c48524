"""Requests of a step, to be found by what their tokens have in common with another one's."""

from __future__ import annotations

from bisect import bisect_left
from typing import Generic, TypeVar

from scheduler_svc.core.requests.request import TOKEN_BYTES, Request, RequestView

R = TypeVar("R", Request, RequestView)


class PrefixIndex(Generic[R]):
    """Requests, by any block of their tokens. One is asked for at one depth by most, namely where the cached prefix of
    them all ends: so what it holds is sorted by the blocks at that depth when somebody asks for it, and not before."""

    __slots__ = ("_at_depth", "_block_size", "_items")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._items: list[tuple[R, int]] = []
        # Depth in tokens: how many of the items are in it, and these by the tokens of their block there.
        self._at_depth: dict[int, tuple[int, dict[bytes, list[tuple[R, int]]]]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: R, num_tokens: int) -> None:
        """Only so many of its tokens count."""
        self._items.append((request, num_tokens))

    def alike(self, request: Request | RequestView, depth: int) -> list[tuple[R, int]]:
        """Those, in order, that have the same whole block behind so many tokens; what stands before it, and of which
        namespace it is, has not been compared."""
        first, end = depth * TOKEN_BYTES, (depth + self._block_size) * TOKEN_BYTES
        count, by_block = self._at_depth.get(depth, (0, {}))
        for item in self._items[count:]:
            if item[1] >= depth + self._block_size:
                by_block.setdefault(item[0].token_ids[first:end], []).append(item)
        self._at_depth[depth] = len(self._items), by_block
        return by_block.get(request.token_ids[first:end], [])


def common_blocks(others: bytes, tokens: bytes, low: int, high: int, block_size: int) -> int:
    """How many tokens of whole blocks these have in common: at least `low`, of `high` at the most."""
    if others.startswith(tokens[: high * TOKEN_BYTES]):  # mostly all of it
        return high
    lengths = range(high, low, -block_size)
    i = bisect_left(lengths, True, key=lambda n: others.startswith(tokens[: n * TOKEN_BYTES]))
    return lengths[i] if i < len(lengths) else low
