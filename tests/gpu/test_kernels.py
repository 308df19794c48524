"""FlashInfer's kernels through our backend against dense attention in float64, and the layer's other kernels against
plain torch in float32. In bf16 and fp16, the error may be up to 1 % in norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_worker.attention.base import AttentionMetadata, DeviceTables
from gpu_worker.attention.flashinfer import FlashInferAttention
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.models.config import DecoderConfig, RopeConfig
from gpu_worker.models.flashinfer_ops import FlashInferOps
from gpu_worker.models.ops import TorchOps
from tests.support.attention import dense, fill, metadata_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TOLERANCE = 0.01

DECODES = [(0, 1), (15, 1), (16, 1), (700, 1), (2047, 1)]
CHUNKS = [(0, 33), (100, 1), (64, 65), (1000, 257)]


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    ours, reference = ours.double().cpu(), reference.double().cpu()
    return float((ours - reference).norm() / reference.norm())


def on_device(metadata: AttentionMetadata) -> AttentionMetadata:
    tables = metadata.tables
    assert tables is not None
    return AttentionMetadata(
        metadata.num_decodes,
        metadata.qo_indptr,
        metadata.kv_indptr,
        metadata.kv_indices,
        metadata.last_block_len,
        metadata.slot_mapping.to(DEVICE),
        metadata.captured,
        DeviceTables(*(table.to(DEVICE) for table in (tables.kv_indptr, tables.last_block_len, tables.kv_indices))),
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("kv_heads", "groups"), [(8, 4), (1, 7), (4, 1)])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("decodes", "chunks"), [(DECODES, []), ([], CHUNKS), (DECODES, CHUNKS)])
def test_attention(
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    window: int,
    kv_heads: int,
    groups: int,
    head_dim: int,
    flashinfer: Any,
) -> None:
    extents, block_size, dtype = decodes + chunks, 16, torch.bfloat16
    lengths = [prefix + count for prefix, count in extents]
    needed = [-(-length // block_size) for length in lengths]
    pool = allocate_pool(sum(needed), block_size, 2, kv_heads, head_dim, dtype, DEVICE)
    torch.manual_seed(1)
    ids = (1 + torch.randperm(sum(needed))).tolist()
    tables = [[ids.pop() for _ in range(n)] for n in needed]
    full = [torch.randn(2, length, kv_heads, head_dim).to(dtype) for length in lengths]
    host = pool.storage.cpu()
    for (prefix, _), table, kv in zip(extents, tables, full, strict=True):
        fill(host, 1, table, kv[:, :prefix])
    pool.storage.copy_(host)
    rows = sum(count for _, count in extents)
    q = torch.randn(rows, kv_heads * groups, head_dim).to(dtype)
    new = torch.cat([kv[:, prefix:] for (prefix, _), kv in zip(extents, full, strict=True)], dim=1).to(DEVICE)
    attention = FlashInferAttention(flashinfer, pool, (0, window), kv_heads * groups, rows)
    attention.plan(on_device(metadata_of(len(decodes), extents, tables, block_size)))
    # As the model passes them: views of one projection.
    projected = torch.cat((q.to(DEVICE), new[0], new[1]), dim=1)
    heads = kv_heads * groups
    out = attention.run(
        1, projected[:, :heads], projected[:, heads : heads + kv_heads], projected[:, heads + kv_heads :]
    )
    start = 0
    for (_, count), kv in zip(extents, full, strict=True):
        expected = dense(q[start : start + count], kv[0], kv[1], window)
        assert error(out[start : start + count], expected) < TOLERANCE
        start += count
    for table, kv in zip(tables, full, strict=True):
        written = pool.storage[:, 1, table].flatten(1, 2)[:, : kv.shape[1]]
        assert torch.equal(written.cpu(), kv)
    assert not pool.storage[:, 0].any(), "another layer was written"
    assert not pool.storage[:, :, 0].any(), "the dummy block was written"


def test_the_norms_are_the_cuda_kernels(flashinfer: Any) -> None:
    """FlashInfer uses its CUDA norm kernels even if CuTe DSL is installed, so test_layer_ops tests those kernels."""
    assert flashinfer.norm._use_cuda_norm(DEVICE)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 77, 2049])
def test_layer_ops(rows: int, dtype: torch.dtype, head_dim: int, qk_norm: bool, flashinfer: Any) -> None:
    config = DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=11,
        hidden_size=4096,
        intermediate_size=1536,
        num_layers=1,
        num_heads=14,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 10_000.0),
        max_positions=4096,
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        qk_norm=qk_norm,
        windows=(0,),
        eos_token_ids=(),
        dtype="bfloat16",
    )
    plain, ours = TorchOps(config, 4096, DEVICE), FlashInferOps(flashinfer, config, 4096, DEVICE)
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, weight = random(rows, 4096), random(4096)
    assert error(ours.norm(x, weight), plain.norm(x.float(), weight.float())) < TOLERANCE
    gate_up = random(rows, 3072)
    assert error(ours.silu_and_mul(gate_up), plain.silu_and_mul(gate_up.float())) < TOLERANCE
    heads, positions = random(rows, 18, head_dim), torch.randint(0, 4096, (rows,), device=DEVICE)
    positions[-1] = 4095
    values = heads[:, 16:].clone()
    norms = (random(head_dim), random(head_dim)) if qk_norm else (None, None)
    wide = tuple(None if norm is None else norm.float() for norm in norms)
    expected = plain.rotary(heads.float(), plain.angles(positions), wide[0], wide[1])
    turned = ours.rotary(heads, ours.angles(positions), *norms)
    for mine, other in zip(turned, expected, strict=True):
        assert error(mine, other) < TOLERANCE
    assert torch.equal(heads[:, 16:], values), "the values were rotated, too"
