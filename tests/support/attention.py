"""Batches for attention backends, and dense attention to compare with."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.attention.base import AttentionMetadata, DeviceTables

# (tokens already in the blocks, new tokens)
Extents = list[tuple[int, int]]


def metadata_of(
    num_decodes: int, extents: Extents, tables: list[list[int]], block_size: int, captured: bool = False
) -> AttentionMetadata:
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (prefix, count), table in zip(extents, tables, strict=True)
        for position in range(prefix, prefix + count)
    ]
    lengths = np.array([prefix + count for prefix, count in extents])
    used = -(-lengths // block_size)
    kv_indices = np.concatenate([table[:n] for table, n in zip(tables, used, strict=True)]).astype(np.int32)
    kv_indptr = np.cumsum([0, *used]).astype(np.int32)
    last_block_len = (lengths - (used - 1) * block_size).astype(np.int32)
    return AttentionMetadata(
        num_decodes=num_decodes,
        qo_indptr=np.cumsum([0] + [count for _, count in extents]).astype(np.int32),
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_block_len=last_block_len,
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        captured=captured,
        tables=DeviceTables(*(torch.from_numpy(array.copy()) for array in (kv_indptr, last_block_len, kv_indices))),
    )


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """q [rows, heads, d]: the last rows of a causal sequence; k, v [tokens, kv_heads, d]. Computes in float64."""
    rows, heads, d = q.shape
    groups = heads // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / d**0.5
    row = torch.arange(len(k) - rows, len(k))[:, None]
    key = torch.arange(len(k))
    hidden = key > row
    if window:
        hidden |= key <= row - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def fill(storage: torch.Tensor, layer: int, table: list[int], kv: torch.Tensor) -> None:
    """kv [2, tokens, kv_heads, head_dim] into a pool's storage."""
    block_size = storage.shape[3]
    for position in range(kv.shape[1]):
        storage[:, layer, table[position // block_size], position % block_size] = kv[:, position]
