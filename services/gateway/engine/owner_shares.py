"""Kept requests by owner, so that what has to go is the oldest of the owner that keeps the most.

So no owner can push out what another keeps within an equal share of the limit (max-min fairness).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class OwnerShares(Generic[K, V]):
    """Entries in the order in which they came. `owner_of`: the owner of a key. `num_bytes`: of all entries."""

    def __init__(self, owner_of: Callable[[K], str]) -> None:
        self._owner_of = owner_of
        self._entries: dict[K, V] = {}
        self._sizes: dict[str, dict[K, int]] = {}  # of each owner's entries, in their order
        self._num_bytes_of: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[K, V]]:
        """The entries, the oldest first."""
        return iter(self._entries.items())

    def add(self, key: K, value: V, num_bytes: int = 0) -> None:
        """Add an entry that is not there yet."""
        owner = self._owner_of(key)
        self._entries[key] = value
        self._sizes.setdefault(owner, {})[key] = num_bytes
        self._num_bytes_of[owner] = self._num_bytes_of.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes

    def remove(self, key: K) -> None:
        """Remove an entry. No effect if it is not there."""
        if self._entries.pop(key, None) is None:
            return
        owner = self._owner_of(key)
        num_bytes = self._sizes[owner].pop(key)
        self._num_bytes_of[owner] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._sizes[owner]:
            del self._sizes[owner], self._num_bytes_of[owner]

    def first_of_most(self) -> K:
        """The oldest entry of the owner with the most entries. There must be an entry."""
        owner = max(self._sizes, key=lambda owner: len(self._sizes[owner]))
        return next(iter(self._sizes[owner]))

    def first_of_largest(self) -> K:
        """The oldest entry of the owner with the most bytes. There must be an entry."""
        return next(iter(self._sizes[max(self._num_bytes_of, key=self._num_bytes_of.__getitem__)]))
