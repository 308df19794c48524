"""Sequences that have blocks, on the device or in host memory."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cache_svc.core.errors import Code, OpError
from cache_svc.core.retention import Range, read_ranges
from cache_svc.core.tree.tree import TOKEN_BYTES, PrefixNode, Root
from paceline.v1.common_pb2 import RetentionRange

if TYPE_CHECKING:
    from cache_svc.core.sequences.restore import Claim
    from cache_svc.core.sequences.worker_blocks import Worker
    from cache_svc.core.tree.subscriptions import Waiter


def pack_int32(values: array[int]) -> bytes:
    """Packed little-endian int32, as block ids and token ids travel."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpack_int32(packed: bytes) -> array[int]:
    """The reverse. ValueError if the bytes are not a whole number of int32."""
    values = array("i", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class Terms(NamedTuple):
    """What a request asked for, of how its blocks are kept."""

    priority: float = 0.0
    retention: tuple[Range, ...] = ()
    tenant: str = ""  # what is retained counts against its share


NO_TERMS = Terms()


def read_terms(priority: float, retention: Iterable[RetentionRange], tenant: str) -> Terms:
    """Raises OpError(INVALID_ARGUMENT)."""
    if not math.isfinite(priority):  # what compares with nothing has no place in the order of eviction
        raise OpError(Code.INVALID_ARGUMENT, f"priority: {priority} is not a finite number")
    return Terms(priority, read_ranges(retention), tenant)


class Sequence:
    """An admitted sequence. (One that waits is nothing but its tokens.)

        table   [ b0 b1 b2 | b3 | b4 b5 ]     one block id per `block_size` tokens, append-only
                  reused     own
                            ^ node            the tree's node that ends where the whole computed blocks end (or
                                              before that, where it met what another one was just to write)

    What the step is to compute for which it was granted counts as computed. Until that step has been sent, the sequence
    and those with whom it shares are `unwritten`.
    The sequence uses that node and all above it. Their blocks are those of the table, unless equal ones of another
    sequence got there first: then it uses both, and its own stay outside of the tree (`duplicates`). One that reuses
    nothing (`alone`) would need room for both to run at all: its node ends before such blocks.
    """

    __slots__ = (
        "alone",
        "duplicates",
        "node",
        "num_begun_tokens",
        "num_computed_tokens",
        "num_tokens",
        "root",
        "sequence_id",
        "table",
        "terms",
        "tokens",
        "unwritten",
        "worker",
    )

    def __init__(
        self,
        known: Waiter | SwappedSequence | Claim,
        worker: Worker,
        table: array[int],
        node: PrefixNode,
        num_computed_tokens: int,
    ) -> None:
        self.sequence_id = known.sequence_id
        self.worker = worker
        self.tokens = known.token_ids  # not copied, as most get more of them once at the most, when they leave
        self.root = known.root
        self.num_tokens = len(known.token_ids) // TOKEN_BYTES
        self.table = table
        self.node = node
        self.num_computed_tokens = num_computed_tokens
        self.alone = False
        self.unwritten = False
        # With which it was admitted, some of them perhaps yet to be copied; who has more has seen the copy made.
        self.num_begun_tokens = num_computed_tokens
        self.duplicates = array("i")
        self.terms = known.terms


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
    host_blocks: array[int]
    root: Root
    terms: Terms

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES
