"""Sequences that have blocks, on the device or in host memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.request_metadata import RequestMetadata
from cache_svc.core.tree.nodes import PrefixNode, Root


class KnownSequence(Protocol):
    """The data that a Sequence is made from. A waiting, a swapped-out and a restored sequence all have it."""

    @property
    def sequence_id(self) -> int:
        """The scheduler's number of the sequence."""

    @property
    def token_ids(self) -> bytes:
        """Known tokens, packed little-endian int32."""

    @property
    def root(self) -> Root:
        """The tree's root for the sequence's namespace."""

    @property
    def metadata(self) -> RequestMetadata:
        """The request's priority, retention and tenant."""


class Sequence:
    """An admitted sequence. (A waiting sequence has no blocks: see PrefixSubscription.)

        table   [ b0 b1 b2 | b3 | b4 b5 ]     one block id per `block_size` tokens, append-only
                  reused     own, whole and computed: b3; not yet: b4, b5
                                ^ node        the tree's node where the whole computed blocks end (or an earlier node,
                                              if the next one is about to be written by another sequence)

    Planned tokens count as computed as soon as the cache grants the step that computes them; other tokens count when
    they are committed. Until that step is sent, the sequence is `unwritten`, and so are sequences that share its new
    blocks.

    The sequence uses `node` and all nodes above it. Their blocks are those of the table, unless another sequence stored
    equal blocks first. Then the sequence uses both, and its own blocks stay outside the tree (`duplicates`). For a
    sequence that was admitted without reuse (`alone`), there may be too few blocks for both copies. So its node ends
    before the first such block.
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
        self, known: KnownSequence, worker_id: int, table: array[int], node: PrefixNode, num_computed_tokens: int
    ) -> None:
        self.sequence_id = known.sequence_id
        self.worker_id = worker_id
        self.tokens = known.token_ids  # not copied: most sequences get more tokens at most once, when they leave
        self.root = known.root
        self.num_tokens = len(known.token_ids) // TOKEN_BYTES
        self.table = table
        self.node = node
        self.num_computed_tokens = num_computed_tokens
        self.alone = False
        self.unwritten = False
        # Computed tokens at admission. The first tokens of a cached block may be copied into a block of the sequence.
        # Until the sequence has computed more tokens, this copy is perhaps still to be made.
        self.num_begun_tokens = num_computed_tokens
        self.duplicates = array("i")
        self.metadata = known.metadata


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """A sequence that was swapped out and returns to the same worker.

    It has no device block and no node. It has one host block for each block with computed tokens.
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
        """Known tokens."""
        return len(self.token_ids) // TOKEN_BYTES
