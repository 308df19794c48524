"""Why an admitted sequence has not reused more of its prompt: `paceline explain` and the live view show it.

    cached | on another worker | in flight | evicted | new | the last block

The cache says how many tokens are on another worker, in flight and evicted. The scheduler derives the other two: the
tokens after the last block boundary, which a match never has, and the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cache_svc.core.packing import TOKEN_BYTES, common_tokens
from cache_svc.core.sequences.sequence import Sequence
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import PrefixNode
from cache_svc.core.tree.tree import PrefixTree

MAX_PREFILLING = 64


class Misses(NamedTuple):
    """Tokens after the cached ones, in this order. `other_worker`: one that has them; 0 without such tokens."""

    num_other_worker_tokens: int = 0
    other_worker: int = 0
    num_in_flight_tokens: int = 0
    num_evicted_tokens: int = 0


NO_MISSES = Misses()


class Prefilling:
    """The last MAX_PREFILLING sequences that were admitted with whole blocks to compute."""

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque(maxlen=MAX_PREFILLING)

    def add(self, sequence: Sequence) -> None:
        """The sequence was admitted, and will compute at least one whole block."""
        self._sequences.append(sequence)

    def num_in_flight(self, tree: PrefixTree, node: PrefixNode, wanted: bytes, admitted: Mapping[int, Sequence]) -> int:
        """How many of these whole blocks after a node another sequence will compute. Forgets the sequences that have
        ended or computed all blocks."""
        most, block_size = 0, tree.block_size
        for _ in range(len(self._sequences)):
            sequence = self._sequences.popleft()
            is_over = sequence.num_computed_tokens + block_size > sequence.num_tokens
            if is_over or admitted.get(sequence.sequence_id) is not sequence:
                continue
            self._sequences.append(sequence)
            if sequence.node is node:
                begin = node.end * tree.block_bytes
                own = sequence.tokens[begin : min(begin + len(wanted), sequence.num_tokens * TOKEN_BYTES)]
                most = max(most, common_tokens(own, wanted) // block_size)
        return most


def find_misses(
    tree: PrefixTree,
    workers: Iterable[WorkerBlocks],
    place: tuple[PrefixNode, int],
    num_cached_tokens: int,
    token_ids: bytes,
    prefilling: Prefilling,
    admitted: Mapping[int, Sequence],
) -> Misses:
    """`place`: where the longest match on any worker ends. `num_cached_tokens`: what its own worker had of it."""
    (node, depth), block_size = place, tree.block_size
    limit = tree.max_match(token_ids)
    if num_cached_tokens >= limit * block_size:
        return NO_MISSES
    num_other = max(min(depth, limit) * block_size - num_cached_tokens, 0) if node.residencies else 0
    other = next((worker.worker_id for worker in workers if worker.holds(node)), 0) if num_other else 0
    reached = num_cached_tokens + num_other
    if depth != node.end or reached // block_size != depth:
        return Misses(num_other, other)
    wanted = token_ids[depth * tree.block_bytes : limit * tree.block_bytes]
    num_in_flight = prefilling.num_in_flight(tree, node, wanted, admitted)
    num_evicted = tree.evicted.count(node, token_ids, num_in_flight, limit)
    # The sequence may have copied the beginning of the first one of these blocks.
    in_flight = max((depth + num_in_flight) * block_size - reached, 0)
    evicted = max((depth + num_in_flight + num_evicted) * block_size - reached - in_flight, 0)
    return Misses(num_other, other, in_flight, evicted)
