"""Totals of what the cache has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """Totals since the core was made; a reset keeps them. Metrics have the same names (cache_svc/metrics.py).

    `forked_sequences` has no metric.
    """

    exchanges: int = 0
    evicted_blocks: int = 0  # of devices
    evicted_host_blocks: int = 0  # also blocks dropped because the host had no room for the block before them
    # Tokens of sequences at their first admission, and how many of these were reused. Not counted: forks, sequences
    # that must not reuse blocks, and workers without prefix caching.
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    # Copied from the device to the host at their eviction, and back for a later sequence.
    demoted_blocks: int = 0
    demoted_tails: int = 0  # partial blocks among the demoted blocks
    promoted_blocks: int = 0
    forked_sequences: int = 0
    sharing_sequences: int = 0  # admitted with blocks that another sequence computes in the same step
    copied_blocks: int = 0  # of which an admitted sequence (no fork) copied the beginning, on the device or the host
    copied_host_blocks: int = 0  # those of the host among them
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    refused_ops: int = 0
    pins_given_up: int = 0  # how often a worker gave up all its pins
    restored_sequences: int = 0
    refused_claims: int = 0  # restore entries that were refused
