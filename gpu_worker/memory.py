"""How many KV blocks fit on a GPU: the allowed share of its memory, less weights, steps, graphs and sampling.

The largest step and the two largest graphs of each kind are measured; the other graphs and sampling are calculated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from gpu_worker.errors import ModelError
from gpu_worker.sampling.prompt_scores import SCORER_BYTES_PER_LOGIT, rows_at_once
from gpu_worker.steps.graphs import Capture, CaptureProgress, CudaCapture
from gpu_worker.steps.runner import ModelRunner

# The largest memory that sampling takes beyond the logits: that of typical-p (sampling/filters.py). Per logit: six
# arrays of 4 bytes (surprise, probability, distance, negative distance, its bits, and weights), and five of 8 bytes
# (upper and lower half of the bits, a copy of one half, and two of the weights). Per row: three float64 sums and a bool
# for each of 2**16 values of half a float32.
SAMPLER_BYTES_PER_LOGIT = 6 * 4 + 5 * 8
SAMPLER_BYTES_PER_ROW = 2**16 * (3 * 8 + 1)

# The counts of penalties (RowPool): one row per slot, and as many again while the pool grows.
COUNTS_BYTES_PER_LOGIT = 2 * 4

# The least memory of a graph, for FlashInfer's plans: 8 MiB per kind of window. The allocator takes memory from the
# device for several graphs at once, so that a single graph may seem to take none.
MIN_GRAPH_BYTES = 2 * 8 * 2**20
# The least memory of a captured piece: the driver's copies of some ten kernel launches. Assumed, not measured.
MIN_PIECE_BYTES = 2**18


def kv_blocks_that_fit(
    total_bytes: int, free_bytes: int, needed_bytes: int, utilization: float, block_bytes: int
) -> int:
    """total, free: the device's memory with the weights on it. needed: memory of steps, without the pool.

    Raises ModelError if no block fits."""
    used_bytes = total_bytes - free_bytes
    pool_bytes = int(total_bytes * utilization) - used_bytes - needed_bytes
    # One block more, for the dummy block.
    num_blocks = pool_bytes // block_bytes - 1
    if num_blocks < 1:
        gib = 2**30
        raise ModelError(
            f"no room for KV blocks: gpu_memory_utilization {utilization} of {total_bytes / gib:.1f} GiB, "
            f"{used_bytes / gib:.1f} GiB taken by weights and others, {needed_bytes / gib:.1f} GiB needed for steps"
        )
    return num_blocks


def bytes_for_steps(
    make_runner: Callable[[], ModelRunner],
    graph_sizes: list[int],
    device: torch.device,
    piece_sizes: Sequence[int] = (),
    num_layers: int = 0,
) -> int:
    """The memory of the largest step, the graphs and sampling. `make_runner` makes a runner with the smallest pool.
    num_layers: how many pieces are captured for each of `piece_sizes`, one per layer."""
    before = _free_bytes(device)
    runner = make_runner()
    runner.try_largest_step()
    taken = before - _free_bytes(device)
    torch.cuda.empty_cache()  # as a capture does; otherwise the step's memory would hide the graphs' memory
    if graph_sizes:
        taken += _bytes_for_graphs(runner.capture_graphs, graph_sizes, MIN_GRAPH_BYTES, device)
    if piece_sizes:
        least = MIN_PIECE_BYTES * num_layers
        taken += _bytes_for_graphs(runner.capture_pieces, list(piece_sizes), least, device)
    limits = runner.limits
    pools = runner.pools
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    if pools:  # an embedding model samples no token, and the runner already has the sums for mean pooling
        return max(0, taken)
    sampling = (SAMPLER_BYTES_PER_LOGIT * limits.vocab_size + SAMPLER_BYTES_PER_ROW) * limits.max_num_seqs
    scored_rows = min(rows_at_once(limits.vocab_size), limits.max_batched_tokens)
    scoring = SCORER_BYTES_PER_LOGIT * scored_rows * limits.vocab_size
    counts = COUNTS_BYTES_PER_LOGIT * limits.vocab_size * limits.max_num_seqs
    return max(0, taken) + max(sampling, scoring) + counts  # sampling and scoring run one after the other


def _bytes_for_graphs(
    capture_all: Callable[[list[int], Capture, CaptureProgress], None],
    sizes: list[int],
    least: int,
    device: torch.device,
) -> int:
    """The memory of the graphs of these sizes. Captures the two largest: all graphs share the largest graph's memory,
    and beyond that each takes about as much as the second one, but at least `least` bytes."""
    free = [_free_bytes(device)]

    def note(done: int, total: int) -> None:
        if done:
            free.append(_free_bytes(device))

    capture_all(sizes[-2:], CudaCapture(), note)
    drops = [max(0, more - less) for more, less in pairwise(free)]
    return free[0] - free[-1] + max(drops[-1], least) * (len(sizes) - len(drops))


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes
