"""The blocks of one worker: who is free, who is in use, who is kept for reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Block ids 1..num_blocks, each in exactly one of three states:

        free    no user, content worthless       `_recycled` and everything from `_first_untouched` on
        cached  no user, content in the tree     `_unused`, least recently used first
        used    users[block] >= 1                neither

    The ids that were never handed out are not listed anywhere, so a pool costs memory for the blocks it has used, not
    for the blocks it has.
    """

    __slots__ = ("_first_untouched", "_on_evict", "_recycled", "_unused", "evicted_blocks_total", "num_blocks", "users")

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None]) -> None:
        """`on_evict(blocks)` is called when cached blocks lose their content, before they are handed out."""
        self.num_blocks = num_blocks
        self.evicted_blocks_total = 0
        self.users: list[int] = [0]  # by block id, grown on first use; block 0 is the worker's dummy and never ours
        self._recycled: list[int] = []
        self._first_untouched = 1
        # A linked list in C. (A plain dict finds its oldest key by a scan over everything deleted before it.)
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def free_blocks(self) -> int:
        return len(self._recycled) + self.num_blocks + 1 - self._first_untouched

    @property
    def cached_blocks(self) -> int:
        return len(self._unused)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks - len(self._unused)

    @property
    def available_blocks(self) -> int:
        """How many blocks `take` can hand out: free ones and cached ones."""
        return self.free_blocks + len(self._unused)

    def take(self, count: int) -> list[int]:
        """Blocks with one user and no content: free ones, then cached ones, which are evicted, least recent first.

        The caller has made sure that there are as many (`available_blocks`).
        """
        recycled, users = self._recycled, self.users
        reused = recycled[: -count - 1 : -1]
        del recycled[len(recycled) - len(reused) :]
        for block in reused:
            users[block] = 1
        if len(reused) == count:
            return reused
        first = self._first_untouched
        untouched = range(first, min(first + count - len(reused), self.num_blocks + 1))
        self._first_untouched += len(untouched)
        users += [1] * len(untouched)
        return [*reused, *untouched, *self._evict(count - len(reused) - len(untouched))]

    def _evict(self, count: int) -> list[int]:
        if not count:
            return []
        pop_oldest = self._unused.popitem
        blocks = [pop_oldest(last=False)[0] for _ in range(count)]
        self._on_evict(blocks)
        for block in blocks:
            self.users[block] = 1
        self.evicted_blocks_total += count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more user of each of these blocks, all of which are in use."""
        users = self.users
        for block in blocks:
            users[block] += 1

    def revive(self, blocks: list[int]) -> None:
        """The first user of each of these cached blocks: they are used now."""
        users, unused = self.users, self._unused
        for block in blocks:
            users[block] = 1
            del unused[block]

    def drop(self, blocks: list[int]) -> list[int]:
        """One user less of each of these blocks in the tree. Returns those that are cached now, the last the most
        recent one.
        """
        users, unused = self.users, self._unused
        no_users = []
        for block in blocks:
            left = users[block] - 1
            users[block] = left
            if not left:
                unused[block] = None
                no_users.append(block)
        return no_users

    def recycle(self, blocks: list[int]) -> None:
        """A user of these blocks, which are not in the tree, leaves. Those that nobody else uses are free now."""
        users = self.users
        for block in blocks:
            users[block] -= 1
        self._recycled += [block for block in blocks if not users[block]]

    def free_block_ids(self) -> list[int]:
        """The free blocks that were in use before, for checks and tests; the next one handed out is last."""
        return list(self._recycled)

    def cached_block_ids(self) -> list[int]:
        """The cached blocks, the next one to be evicted first. For checks and tests."""
        return list(self._unused)

    @property
    def first_untouched(self) -> int:
        """This block id and all above were never handed out."""
        return self._first_untouched
