"""Small random decoders on the kernels for CPUs, without a checkpoint, and steps for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.decode_attention import WIDTH
from gpu_worker.cpu.layers.all_layers import CpuLayers, cpu_layers
from gpu_worker.cpu.layers.byte_products import has_byte_products
from gpu_worker.cpu.matmul import PackedMatmul, packing
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.kv.pool import KvPool, allocate_pool
from gpu_worker.models.config import DecoderConfig, RopeConfig
from gpu_worker.models.decoder import Decoder, nothing
from gpu_worker.models.matmul import PlainMatmul
from gpu_worker.models.ops import TorchOps
from gpu_worker.models.weights import DecoderWeights, Pack, assemble, expected_tensors
from tests.support.attention import Extents, metadata_of
from tests.unit.worker.ready_kernels import ready_few_rows, ready_kernels

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 600, 4
MAX_POSITIONS = 256
_CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=99,
    hidden_size=192,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig("default", 10_000.0),
    max_positions=MAX_POSITIONS,
    tie_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    windows=(0, 0),
    eos_token_ids=(),
    dtype="float32",
)


def config_of(**changes: Any) -> DecoderConfig:
    """Two layers with 6 query heads and 3 KV heads of 64."""
    return replace(_CONFIG, **changes)


@cache
def weights_of(config: DecoderConfig, dtype: torch.dtype, pack: bool = True) -> DecoderWeights:
    """Random weights, packed as a worker packs them, or plain."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        numbers = torch.randn(*shape, generator=generator)
        if len(shape) == 2 and "embed" not in name:
            numbers /= shape[1] ** 0.5
        elif name.endswith("norm.weight"):
            numbers = 1 + 0.3 * numbers
        tensors[name] = numbers.to(dtype)
    how: Pack | None = None
    if pack:
        how = packing(CPU, dtype, few_rows=True)
        assert how is not None
    return assemble(config, tensors.__getitem__, how)


@dataclass(frozen=True)
class SmallStep:
    """The rows of a step. The blocks of each sequence are scattered over the pool. Without more blocks than a step
    needs, a sequence's KV is the same in every step with the same tables."""

    extents: Extents  # by sequence: tokens already in the pool, new tokens
    tables: list[list[int]]
    tokens: list[list[int]]  # by sequence, the new ones
    block_size: int

    @property
    def metadata(self) -> AttentionMetadata:
        num_decodes = 0
        while num_decodes < len(self.extents) and self.extents[num_decodes][1] == 1:
            num_decodes += 1
        return metadata_of(num_decodes, self.extents, self.tables, self.block_size)

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token for tokens in self.tokens for token in tokens])

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(prefix, prefix + count) for prefix, count in self.extents])

    def of(self, sequences: list[int]) -> SmallStep:
        """A step of some of the sequences."""
        extents, tables = [self.extents[i] for i in sequences], [self.tables[i] for i in sequences]
        return SmallStep(extents, tables, [self.tokens[i] for i in sequences], self.block_size)

    def part(self, sequence: int, skipped: int, count: int) -> SmallStep:
        """A step with `count` new tokens of one sequence, after its first `skipped` new tokens."""
        prefix = self.extents[sequence][0] + skipped
        tokens = self.tokens[sequence][skipped : skipped + count]
        return SmallStep([(prefix, count)], [self.tables[sequence]], [tokens], self.block_size)


def step_of(extents: Extents, seed: int = 0, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE) -> SmallStep:
    random = np.random.default_rng(seed)
    ids = iter((1 + random.permutation(num_blocks)).tolist())
    tables = [[next(ids) for _ in range(-(-(prefix + count) // block_size))] for prefix, count in extents]
    tokens = [random.integers(0, _CONFIG.vocab_size, count).tolist() for _, count in extents]
    return SmallStep(extents, tables, tokens, block_size)


def content_of(step: SmallStep, pool: KvPool, seed: int = 0) -> Tensor:
    """A pool's storage before the step: random keys and values of the tokens that it has, NaN everywhere else."""
    content = torch.full_like(pool.storage, torch.nan)
    generator = torch.Generator().manual_seed(seed)
    for (prefix, _), table in zip(step.extents, step.tables, strict=True):
        position = torch.arange(prefix)
        blocks = torch.tensor(table)[position // step.block_size]
        known = torch.randn(2, pool.num_layers, prefix, *pool.storage.shape[4:], generator=generator)
        content[:, :, blocks, position % step.block_size] = known.to(content.dtype)
    return content


class CountedLayers:
    """CpuLayers that count the steps which they have and have not run."""

    def __init__(self, layers: CpuLayers) -> None:
        self._layers = layers
        self.runs = {True: 0, False: 0}

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None = None,
        before_kernels: Callable[[], None] = nothing,
    ) -> Tensor | None:
        return self._counted(self._layers.run(tokens, positions, wanted, before_kernels))

    def logits(self, tokens: Tensor, positions: Tensor, before_kernels: Callable[[], None] = nothing) -> Tensor | None:
        return self._counted(self._layers.logits(tokens, positions, before_kernels))

    def head(self, hidden: Tensor) -> Tensor | None:
        return self._layers.head(hidden)

    def likeliest(
        self, tokens: Tensor, positions: Tensor, before_kernels: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor] | None:
        likeliest = self._layers.likeliest(tokens, positions, before_kernels)
        self.runs[True] += likeliest is not None
        return likeliest

    def likeliest_of(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._layers.likeliest_of(hidden)

    def _counted(self, result: Tensor | None) -> Tensor | None:
        self.runs[result is not None] += 1
        return result


class SmallDecoder:
    """A decoder with a pool of its own."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        threads: int = 1,
        *,
        at_once: bool,
        num_blocks: int = NUM_BLOCKS,
        block_size: int = BLOCK_SIZE,
        takes_both_cores: bool = False,
    ) -> None:
        """at_once: with CpuLayers. takes_both_cores: as of cpu_layers()."""
        self.pool = _pool(config, dtype, num_blocks, block_size)
        weights = weights_of(config, dtype)
        kernels = ready_kernels(dtype, threads, config.head_dim % WIDTH == 0)
        self.attention = CpuAttention(self.pool, config.windows, kernels)
        ops, matmul = CpuOps(config, MAX_POSITIONS, kernels), PackedMatmul(ready_few_rows(dtype, threads))
        self.layers: CountedLayers | None = None
        self.cpu_layers: CpuLayers | None = None
        if at_once:
            options = {"takes_both_cores": takes_both_cores, "with_bounds": has_byte_products()}
            self.cpu_layers = cpu_layers(config, weights, self.pool, self.attention, ops, matmul, threads, **options)
            assert self.cpu_layers is not None
            self.layers = CountedLayers(self.cpu_layers)
        self.decoder = Decoder(config, weights, self.attention, ops, matmul, self.layers)

    def run(self, step: SmallStep, content: Tensor | None = None) -> Tensor:
        """The hidden states of the rows. content: what the pool contains before the step."""
        if content is not None:
            self.pool.storage.copy_(content)
        self.attention.plan(step.metadata)
        return self.decoder.forward(step.token_ids, step.positions)


def torch_states(config: DecoderConfig, step: SmallStep, content: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states with plain torch in float32, and what the pool contains after the step. Unused parts of the
    pool are 0 instead of NaN."""
    pool = _pool(config, torch.float32, content.shape[2] - 1, step.block_size)
    pool.storage.copy_(content.float().nan_to_num())
    attention = TorchAttention(pool, config.windows)
    weights, ops = weights_of(config, torch.float32, pack=False), TorchOps(config, MAX_POSITIONS, CPU)
    attention.plan(step.metadata)
    hidden = Decoder(config, weights, attention, ops, PlainMatmul()).forward(step.token_ids, step.positions)
    return hidden, pool.storage


def _pool(config: DecoderConfig, dtype: torch.dtype, num_blocks: int, block_size: int) -> KvPool:
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    return allocate_pool(num_blocks, block_size, *sizes, dtype, CPU)
