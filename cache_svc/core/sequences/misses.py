"""Why an admitted sequence has not reused more of its prompt: `paceline explain` and the live view show it.

    cached | on another worker | in flight | evicted | new | the last block

The cache says how many tokens are on another worker, in flight and evicted. The scheduler derives the last two kinds.
A match never has the last token, and without partial reuse it has whole blocks only. The tokens after the last whole
block that a match may have are counted as "the last block". The other tokens are new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from cache_svc.core.packing import TOKEN_BYTES, common_tokens
from cache_svc.core.sequences.sequence import Sequence
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import PrefixNode
from cache_svc.core.tree.tree import PrefixTree

MAX_PREFILLING = 32


class Misses(NamedTuple):
    """Tokens after the cached ones, in this order. `other_worker`: a worker that has the `num_other_worker_tokens`
    tokens; 0: none."""

    num_other_worker_tokens: int = 0
    other_worker: int = 0
    num_in_flight_tokens: int = 0
    num_evicted_tokens: int = 0


NO_MISSES = Misses()


class MissFinder:
    """Finds misses. For in-flight tokens it remembers the last MAX_PREFILLING sequences that were admitted with whole
    blocks to compute. It forgets a sequence that has left the device or has no whole block left to compute."""

    def __init__(self) -> None:
        self._prefilling: deque[int] = deque(maxlen=MAX_PREFILLING)

    def find(
        self,
        sequence: Sequence,
        place: tuple[PrefixNode, int],
        num_cached_tokens: int,
        workers: Mapping[int, WorkerBlocks],
        admitted: Mapping[int, Sequence],
    ) -> Misses:
        """Returns the misses of a sequence that its worker has just admitted, and that is not in `admitted` yet.

        `place`: where the longest match on any worker ended. `num_cached_tokens`: how many tokens its own worker had.
        """
        (node, depth), token_ids = place, sequence.tokens
        tree = workers[sequence.worker_id].tree
        limit, block_size = tree.max_match(token_ids), tree.block_size
        if num_cached_tokens >= limit * block_size:
            return NO_MISSES
        num_other = max(min(depth, limit) * block_size - num_cached_tokens, 0) if node.residencies else 0
        other = next((worker.worker_id for worker in workers.values() if worker.holds(node)), 0) if num_other else 0
        reached = num_cached_tokens + num_other
        in_flight = evicted = 0
        if depth == node.end and reached // block_size == depth:
            num_in_flight = self._num_in_flight(tree, node, token_ids, limit, admitted)
            num_evicted = tree.evicted.count(node, token_ids, num_in_flight, limit)
            if num_in_flight or num_evicted:
                # The sequence may have copied the beginning of the first one of these blocks.
                in_flight = max((depth + num_in_flight) * block_size - reached, 0)
                evicted = max((depth + num_in_flight + num_evicted) * block_size - reached - in_flight, 0)
        self._prefilling.append(sequence.sequence_id)
        return Misses(num_other, other, in_flight, evicted) if num_other or in_flight or evicted else NO_MISSES

    def _num_in_flight(
        self, tree: PrefixTree, node: PrefixNode, token_ids: bytes, limit: int, admitted: Mapping[int, Sequence]
    ) -> int:
        """Returns how many whole blocks after a node, up to block `limit`, another sequence will compute."""
        most, block_size = 0, tree.block_size
        begin, end = node.end * tree.block_bytes, limit * tree.block_bytes
        first, computing = token_ids[begin : begin + tree.block_bytes], list[int]()
        for sequence_id in self._prefilling:
            sequence = admitted.get(sequence_id)
            if sequence is None or sequence.num_computed_tokens + block_size > sequence.num_tokens:
                continue
            computing.append(sequence_id)
            # Other prompts usually differ in this block already. Then the slices below are not made.
            if sequence.node is node and sequence.tokens.startswith(first, begin):
                own = sequence.tokens[begin : min(end, sequence.num_tokens * TOKEN_BYTES)]
                most = max(most, common_tokens(own, token_ids[begin:end]) // block_size)
        if len(computing) < len(self._prefilling):
            self._prefilling = deque(computing, MAX_PREFILLING)
        return most
