"""Runs the GPU's model runner on a CPU: FlashInfer has reference kernels, the pinned inputs are not really pinned, and
a replayed graph calls the captured function again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_worker.attention.flashinfer import FlashInferAttention
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.flashinfer_ops import FlashInferOps
from gpu_worker.models.loader import load_model
from gpu_worker.models.matmul import PlainMatmul
from gpu_worker.steps.graphs import Capture, Replay
from gpu_worker.steps.inputs import PinnedInputs
from gpu_worker.steps.pooling import Pooler
from gpu_worker.steps.runner import ModelRunner
from gpu_worker.steps.slots import SlotLimits

CPU = torch.device("cpu")


def run_again(run: Callable[[], object]) -> Replay:
    """A graph on a CPU: a replay computes everything again."""

    def replay() -> None:
        run()

    run()
    return replay


def twin(
    flashinfer: Any,
    checkpoint: Path,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    num_blocks: int = 500,
    max_num_seqs: int = 12,
    graph_sizes: tuple[int, ...] = (),
    capture: Capture = run_again,
    fused_sampling: bool = False,
    piece_sizes: tuple[int, ...] = (),
    max_batched_tokens: int = 1024,
) -> ModelRunner:
    assert not (fused_sampling and capture is run_again), "run_again draws into memory that the runner does not read"
    model = load_model(str(checkpoint), dtype=dtype, device=CPU)
    config = model.config
    limits = SlotLimits(
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=config.max_positions,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
    pool = allocate_pool(
        num_blocks, block_size, config.num_layers, config.num_kv_heads, config.head_dim, model.dtype, CPU
    )
    pool.storage[:, :, 1:] = torch.nan  # no kernel may read memory that was not written
    table_blocks = -(-config.max_positions // block_size)
    attention = FlashInferAttention(
        flashinfer, pool, config.windows, config.num_heads, max_batched_tokens, workspace_bytes=1024
    )
    ops = FlashInferOps(flashinfer, config, config.max_positions, CPU)
    decoder = Decoder(config, model.weights, attention, ops, PlainMatmul())
    pooler = None
    if (embedding := model.embedding) is not None:
        pooler = Pooler(embedding, config.hidden_size, max_num_seqs, CPU)
    inputs = PinnedInputs(limits, table_blocks, CPU)
    runner = ModelRunner(decoder, attention, pool, limits, inputs, CPU, pooler=pooler, fused_sampling=fused_sampling)
    if graph_sizes:
        runner.capture_graphs(list(graph_sizes), capture)
    if piece_sizes:
        runner.capture_pieces(list(piece_sizes), capture)
    return runner
