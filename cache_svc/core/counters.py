"""What the cache has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """Totals since the core was made; a reset does not set them back."""

    exchanges: int = 0
    evicted_blocks: int = 0  # of devices
    evicted_host_blocks: int = 0  # also when what leads to them found no room there
    # Of admitted sequences on workers with prefix caching: their tokens, and how many of them were reused.
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    # Copied from the device to the host when they were evicted; and back when they were needed again.
    demoted_blocks: int = 0
    demoted_tails: int = 0  # of these, blocks that were begun and not filled
    promoted_blocks: int = 0
    forked_sequences: int = 0
    sharing_sequences: int = 0  # that share what the same step is to compute for others
    copied_blocks: int = 0  # of which a sequence reused the beginning, on the device or the host
    copied_host_blocks: int = 0  # of these, on the host
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    refused_ops: int = 0
    pins_given_up: int = 0  # of a worker, all at once
    restored_sequences: int = 0
    refused_claims: int = 0  # to be restored
