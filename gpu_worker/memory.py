"""How many KV blocks a GPU has room for: what is left of it when everything else has been tried once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import torch

from gpu_worker.errors import ModelError
from gpu_worker.graphs import CudaCapture
from gpu_worker.runner import ModelRunner
from gpu_worker.sampling.prompt_scores import SCORER_BYTES_PER_LOGIT, rows_at_once

# What sampling takes at the most, beyond the logits: in top-p or typical-p, see sampling/filters.py. For each logit:
# float32 copies (logits, what is filtered, weights) and their bits, both halves of these in 64 bits, one of them once
# more, and the weights twice. For each row: sums by the value of half a float32.
SAMPLER_BYTES_PER_LOGIT = 6 * 4 + 5 * 8
SAMPLER_BYTES_PER_ROW = 2**16 * (3 * 8 + 1)

# What penalties count by, see RowPool: a row for each slot, and as many again when it grows.
COUNTS_BYTES_PER_LOGIT = 2 * 4

# What a graph takes at the least, for what FlashInfer plans with: 8 MiB for each kind of window. The allocator asks the
# device for several of them at once, so that a single graph may seem to take nothing.
MIN_GRAPH_BYTES = 2 * 8 * 2**20


def kv_blocks_that_fit(
    total_bytes: int, free_bytes: int, needed_bytes: int, utilization: float, block_bytes: int
) -> int:
    """total, free: of the device, with the weights on it; needed: what steps will take beside the pool.

    ModelError if there is no room for a block."""
    used_bytes = total_bytes - free_bytes
    pool_bytes = int(total_bytes * utilization) - used_bytes - needed_bytes
    # One more for the dummy.
    num_blocks = pool_bytes // block_bytes - 1
    if num_blocks < 1:
        gib = 2**30
        raise ModelError(
            f"no room for KV blocks: gpu_memory_utilization {utilization} of {total_bytes / gib:.1f} GiB, "
            f"{used_bytes / gib:.1f} GiB taken by weights and others, {needed_bytes / gib:.1f} GiB needed for steps"
        )
    return num_blocks


def bytes_for_steps(make_runner: Callable[[], ModelRunner], graph_sizes: list[int], device: torch.device) -> int:
    """What the largest step, the graphs and sampling take. `make_runner` makes one with the smallest pool there is."""
    before = _free_bytes(device)
    runner = make_runner()
    runner.try_largest_step()
    taken = before - _free_bytes(device)
    torch.cuda.empty_cache()  # as each capture does: what the step took would count against what the graphs take
    if graph_sizes:
        # The largest graph's memory serves the others too; each of them then takes about what the second one takes.
        free: list[int] = []
        runner.capture_graphs(graph_sizes[-2:], CudaCapture(), lambda done, total: free.append(_free_bytes(device)))
        drops = [max(0, more - less) for more, less in pairwise(free)]
        taken += free[0] - free[-1] + max(drops[-1], MIN_GRAPH_BYTES) * (len(graph_sizes) - len(drops))
    limits = runner.limits
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    sampling = (SAMPLER_BYTES_PER_LOGIT * limits.vocab_size + SAMPLER_BYTES_PER_ROW) * limits.max_num_seqs
    scored_rows = min(rows_at_once(limits.vocab_size), limits.max_batched_tokens)
    scoring = SCORER_BYTES_PER_LOGIT * scored_rows * limits.vocab_size
    counts = COUNTS_BYTES_PER_LOGIT * limits.vocab_size * limits.max_num_seqs
    return max(0, taken) + max(sampling, scoring) + counts  # sampling and scoring: one after the other


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes
