"""Attention over the paged pool with plain torch.

Sequences with one row (decodes) run in groups of similar length: their blocks are gathered into scratch memory that
stays in the CPU's cache, and one SDPA call serves the group. Sequences with more rows (prefill chunks) run one by one,
in tiles of rows, so that a mask stays small.

Two details follow measurements. New memory for a gather costs page faults, so scratch memory is reused. SDPA with one
query row and enable_gqa is an order of magnitude slower than with the query heads of a KV head as rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata
from gpu_worker.device import upload
from gpu_worker.kv.pool import DUMMY_BLOCK, KvPool

# K and V that a decode group gathers. A larger group does not fit into a core's second-level cache.
GROUP_BYTES = 2 << 20
# The cost of one more group (three calls), as bytes gathered in the same time. More padding than this starts a new
# group.
GROUP_OVERHEAD_BYTES = 256 << 10
# Elements of a prefill mask (rows x keys).
TILE_ELEMENTS = 2 << 20

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gather:
    """Blocks to copy into scratch memory, and the views of it that every layer needs. The views are made once per step,
    because a view costs as much as a small operation."""

    block_ids: Tensor  # int64 [sequences * width]
    key_blocks: Tensor  # [sequences * width, elements of a block]
    value_blocks: Tensor
    keys: Tensor  # the same memory: [sequences, kv_heads, width * block_size, head_dim]
    values: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length that one SDPA call serves."""

    rows: Tensor | None  # int64 [group]; None: all rows of the step, in order
    gather: Gather
    mask: Tensor  # [group, 1, 1, width * block_size], added to the scores


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one chunk, and the keys (counted from the first gathered key) that they may see."""

    rows: slice
    keys: slice
    mask: Tensor | None  # None: causal, from the start of the sequence


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One prefill chunk, in tiles of rows."""

    rows: slice
    gather: Gather | None  # None: the chunk has all keys itself
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The work of a step for all layers with the same attention window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkPlan, ...]


class TorchAttention:
    """AttentionBackend. `windows`: per layer, how many tokens a token sees, itself included; 0: all. With `by_row`, the
    result of a row depends only on its own tokens, bit for bit: all rows are decodes, and no row is padded to another
    row's length."""

    reads_whole_blocks = True

    def __init__(self, pool: KvPool, windows: tuple[int, ...], by_row: bool = False) -> None:
        self._by_row = by_row
        self._block_size, self._num_kv_heads, self._head_dim = pool.keys.shape[2:]
        self._windows = windows
        self._dtype, self._device = pool.storage.dtype, pool.storage.device
        block_elements = self._block_size * self._num_kv_heads * self._head_dim
        self._bytes_per_block = 2 * block_elements * self._dtype.itemsize
        self._block_elements = block_elements
        # Two views of the same memory: blocks to gather, and token slots to write.
        self._blocks = [(k.view(-1, block_elements), v.view(-1, block_elements)) for k, v in _layers(pool)]
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in _layers(pool)]
        self._scratch = torch.empty(2, 0, dtype=self._dtype, device=self._device)
        self._slot_mapping = torch.empty(0, dtype=torch.int64)
        self._plans: dict[int, WindowPlan] = {}

    # ── once per step ────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slot_mapping = metadata.slot_mapping.long()
        self._plan_sequences(metadata.by_row(self._block_size) if self._by_row else metadata)

    def _plan_sequences(self, metadata: AttentionMetadata) -> None:
        decodes = np.flatnonzero(np.diff(metadata.qo_indptr) == 1)
        self._plans = {
            window: WindowPlan(
                tuple(self._decode_groups(metadata, decodes, window)), tuple(self._chunks(metadata, window))
            )
            for window in set(self._windows)
        }

    def _chunks(self, metadata: AttentionMetadata, window: int, without: int = 1) -> Iterator[ChunkPlan]:
        """The chunks, without those of at most `without` rows."""
        for i in np.flatnonzero(np.diff(metadata.qo_indptr) > without).tolist():
            yield self._chunk(metadata, i, window)

    def _decode_groups(self, metadata: AttentionMetadata, sequences: Int64s, window: int) -> Iterator[DecodeGroup]:
        kv_lens = metadata.kv_lens(self._block_size)[sequences].astype(np.int64)
        first_blocks = np.maximum(kv_lens - window, 0) // self._block_size if window else np.zeros_like(kv_lens)
        widths = -(-kv_lens // self._block_size) - first_blocks
        order = np.argsort(-widths, kind="stable")
        whole_step = len(sequences) == metadata.num_rows
        for members in self._split(order, widths[order]):
            if whole_step and len(members) == len(sequences):
                members, rows = np.arange(len(sequences)), None
            else:
                rows = upload(metadata.qo_indptr[sequences[members]], self._device)
            width = int(widths[members].max())
            first = first_blocks[members]
            column = np.arange(width)
            starts = metadata.kv_indptr[sequences[members]] + first
            where = np.minimum(starts[:, None] + column, len(metadata.kv_indices) - 1)
            ids = np.where(column < widths[members, None], metadata.kv_indices[where], DUMMY_BLOCK)
            position = first[:, None] * self._block_size + np.arange(width * self._block_size)
            last = kv_lens[members, None]
            hidden = position >= last
            if window:
                hidden |= position < last - window
            yield DecodeGroup(rows, self._gather(ids), self._mask(hidden)[:, None, None])

    def _split(self, order: Int64s, widths: Int64s) -> Iterator[Int64s]:
        """Cut sequences, widest first, into groups. A group fits GROUP_BYTES, or has one sequence. A new group begins
        where it saves more padding than it costs; with `by_row`, wherever a sequence would be padded."""
        start = 0
        while start < len(order):
            widest = int(widths[start])
            most = max(1, GROUP_BYTES // (widest * self._bytes_per_block))
            rest = len(order) - start - np.arange(len(order) - start)
            saved = (widest - widths[start:]) * rest * self._bytes_per_block
            worth = np.flatnonzero(widths[start:] < widest if self._by_row else saved > GROUP_OVERHEAD_BYTES)
            size = min(most, int(worth[0]) if len(worth) else len(order) - start)
            yield order[start : start + size]
            start += size

    def _chunk(self, metadata: AttentionMetadata, i: int, window: int) -> ChunkPlan:
        start, stop = int(metadata.qo_indptr[i]), int(metadata.qo_indptr[i + 1])
        count = stop - start
        kv_len = int(metadata.kv_lens(self._block_size)[i])
        prefix = kv_len - count
        if prefix == 0 and (not window or kv_len <= window):
            return ChunkPlan(slice(start, stop), None, tuple(self._causal_tiles(count)))
        first_block = max(0, prefix - window + 1) // self._block_size if window else 0
        blocks = metadata.kv_indices[metadata.kv_indptr[i] + first_block : metadata.kv_indptr[i + 1]]
        tiles = tuple(self._tiles(count, prefix, window, first_block * self._block_size))
        return ChunkPlan(slice(start, stop), self._gather(blocks[None]), tiles)

    def _causal_tiles(self, count: int) -> Iterator[Tile]:
        yield Tile(slice(0, count), slice(0, count), None)

    def _tiles(self, count: int, prefix: int, window: int, first_key: int) -> Iterator[Tile]:
        size = max(1, TILE_ELEMENTS // (prefix + count - first_key))
        for top in range(0, count, size):
            bottom = min(top + size, count)
            low = max(first_key, prefix + top - window + 1) if window else first_key
            high = prefix + bottom
            row = prefix + np.arange(top, bottom)[:, None]
            key = np.arange(low, high)
            hidden = key > row
            if window:
                hidden |= key <= row - window
            yield Tile(slice(top, bottom), slice(low - first_key, high - first_key), self._mask(hidden))

    def _gather(self, ids: npt.NDArray[np.integer]) -> Gather:
        """ids: [sequences, width]. The gathers of a step use the scratch memory one after the other. A gather that does
        not fit makes larger scratch memory for itself and the later ones."""
        elements = ids.size * self._block_elements
        if self._scratch.shape[1] < elements:
            self._scratch = torch.empty(2, elements, dtype=self._dtype, device=self._device)
        key_blocks, value_blocks = self._scratch[:, :elements].view(2, ids.size, -1)
        keys, values = (
            x.view(len(ids), -1, self._num_kv_heads, self._head_dim).transpose(1, 2) for x in (key_blocks, value_blocks)
        )
        return Gather(upload(ids.ravel(), self._device), key_blocks, value_blocks, keys, values)

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(upload(hidden, self._device), -torch.inf)

    # ── once per layer ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._write(layer, key, value)
        plan = self._plans[self._windows[layer]]
        if len(plan.groups) == 1 and plan.groups[0].rows is None:
            return self._decode(layer, plan.groups[0], query)
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        for group in plan.groups:
            assert group.rows is not None, "a group of all rows is the only one"
            out.index_copy_(0, group.rows, self._decode(layer, group, query.index_select(0, group.rows)))
        for chunk in plan.chunks:
            self._prefill(layer, chunk, query, key, value, out)
        return out

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        for slots, rows in zip(self._slots[layer], (key, value), strict=True):
            slots.index_copy_(0, self._slot_mapping, rows)

    def _decode(self, layer: int, group: DecodeGroup, query: Tensor) -> Tensor:
        count, _, head_dim = query.shape
        self._fetch(layer, group.gather)
        folded = query.view(count, self._num_kv_heads, -1, head_dim)
        keys, values = group.gather.keys, group.gather.values
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask).reshape(count, -1)

    def _prefill(self, layer: int, chunk: ChunkPlan, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        keys, values = self._seen(layer, chunk, key, value)
        query, out = query[chunk.rows], out[chunk.rows]
        for tile in chunk.tiles:
            seen = F.scaled_dot_product_attention(
                query[tile.rows].transpose(0, 1).unsqueeze(0),
                keys[:, :, tile.keys],
                values[:, :, tile.keys],
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
                enable_gqa=True,
            )
            out[tile.rows].view(-1, *query.shape[1:]).copy_(seen[0].transpose(0, 1))

    def _seen(self, layer: int, chunk: ChunkPlan, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that the chunk sees, [1, kv_heads, keys, head_dim], valid until the next _fetch()."""
        if chunk.gather is None:
            return key[chunk.rows].transpose(0, 1).unsqueeze(0), value[chunk.rows].transpose(0, 1).unsqueeze(0)
        self._fetch(layer, chunk.gather)
        return chunk.gather.keys, chunk.gather.values

    def _fetch(self, layer: int, gather: Gather) -> None:
        """Fill the scratch memory. The contents are valid until the next call."""
        keys, values = self._blocks[layer]
        torch.index_select(keys, 0, gather.block_ids, out=gather.key_blocks)
        torch.index_select(values, 0, gather.block_ids, out=gather.value_blocks)


def _layers(pool: KvPool) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(pool.keys, pool.values, strict=True)
