"""Sequences that have blocks, on the device or in host memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.request_metadata import RequestMetadata
from cache_svc.core.tree.nodes import PrefixNode, Root


class KnownSequence(Protocol):
    """What a Sequence is made from: one that waits, one that is swapped out, one that is restored."""

    @property
    def sequence_id(self) -> int: ...

    @property
    def token_ids(self) -> bytes: ...

    @property
    def root(self) -> Root: ...

    @property
    def metadata(self) -> RequestMetadata: ...


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
        "metadata",
        "node",
        "num_begun_tokens",
        "num_computed_tokens",
        "num_tokens",
        "root",
        "sequence_id",
        "table",
        "tokens",
        "unwritten",
        "worker_id",
    )

    def __init__(
        self,
        known: KnownSequence,
        worker_id: int,
        table: array[int],
        node: PrefixNode,
        num_computed_tokens: int,
    ) -> None:
        self.sequence_id = known.sequence_id
        self.worker_id = worker_id
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
        self.metadata = known.metadata


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """A sequence that had to leave the device and is to come back to the same worker.

    It holds no device block and no node, so nobody is kept from anything by it but from its host blocks: one for each
    block with computed tokens.
    """

    sequence_id: int
    worker_id: int
    token_ids: bytes
    num_computed_tokens: int
    host_blocks: array[int]
    root: Root
    metadata: RequestMetadata

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES
