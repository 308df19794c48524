"""Sequences that have blocks, on the device or in host memory."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_svc.core.tree import TOKEN_BYTES, PrefixNode

if TYPE_CHECKING:
    from cache_svc.core.worker import Worker


def pack_int32(values: Iterable[int]) -> bytes:
    """Packed little-endian int32, as block ids and token ids travel."""
    packed = array("i", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Sequence:
    """An admitted sequence. (One that waits is nothing but its tokens.)

        table   [ b0 b1 b2 | b3 | b4 b5 ]     one block id per `block_size` tokens, append-only
        nodes   [ n0 n1 n2 | n3 ]             the tree's node for each block that is full and computed
                  reused     own   still written

    The sequence is a user of its node's block at each depth. That is table[i], unless an equal block of another
    sequence got there first: then it uses both, and table[i] stays its own and outside of the tree.
    """

    __slots__ = ("nodes", "num_computed_tokens", "num_tokens", "sequence_id", "table", "tokens", "worker")

    def __init__(
        self,
        sequence_id: int,
        worker: Worker,
        token_ids: bytes,
        table: list[int],
        nodes: list[PrefixNode],
        computed: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.worker = worker
        self.tokens = bytearray(token_ids)
        self.num_tokens = len(token_ids) // TOKEN_BYTES
        self.table = table
        self.nodes = nodes
        self.num_computed_tokens = computed


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """A sequence that had to leave the device and is to come back to the same worker.

    It holds no device block and no node, so nobody is kept from anything by it but from its host blocks: one for each
    block with computed tokens.
    """

    sequence_id: int
    worker: Worker
    token_ids: bytes
    num_computed_tokens: int
    host_blocks: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES
