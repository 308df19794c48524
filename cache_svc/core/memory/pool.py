"""The free block ids of one memory."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """Block ids 1..num_blocks. Block 0 is the worker's dummy block. The block given back last is handed out first.

    The pool lists no id from `first_untouched` on. So it needs memory for the blocks that it has used, not for all
    blocks.
    """

    __slots__ = ("_given_back", "first_untouched", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.first_untouched = 1  # this id and all above it were never handed out
        self._given_back = array("i")

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._given_back) + self.num_blocks + 1 - self.first_untouched

    def take(self, count: int) -> array[int]:
        """Takes `count` blocks, or all free blocks if there are fewer."""
        given_back = self._given_back
        if len(given_back) >= count:
            left = len(given_back) - count
            blocks = given_back[left:]
            del given_back[left:]
            blocks.reverse()
            return blocks
        blocks, self._given_back = given_back, array("i")
        blocks.reverse()
        first = self.first_untouched
        self.first_untouched = min(first + count - len(blocks), self.num_blocks + 1)
        blocks.frombytes(np.arange(first, self.first_untouched, dtype=np.int32).tobytes())
        return blocks

    def give_back(self, blocks: array[int]) -> None:
        """Frees these blocks. The last one is the next to be handed out."""
        self._given_back += blocks

    def take_listed(self, blocks: set[int]) -> None:
        """Takes exactly these blocks out of a pool that has handed out none."""
        assert self.first_untouched == 1, "blocks were handed out before"
        self.first_untouched = max(blocks, default=0) + 1
        self._given_back.extend(block for block in range(self.first_untouched - 1, 0, -1) if block not in blocks)

    def is_free(self) -> NDArray[np.bool_]:
        """Whether each block is free, by id. Block 0 counts as not free."""
        free = np.zeros(self.num_blocks + 1, np.bool_)
        free[self.first_untouched :] = True
        if self._given_back:
            free[np.frombuffer(self._given_back, np.int32)] = True
        return free

    def given_back(self) -> list[int]:
        """The free blocks below `first_untouched`, for checks and tests. The last one is the next to be handed out."""
        return list(self._given_back)
