"""Attention over the paged pool for CPUs: a compiled kernel for decodes and short chunks, and one for longer chunks. If
the CPU or the model does not suit the second, two batched products, with a compiled softmax between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, Int32s
from gpu_worker.attention.torch_backend import ChunkPlan, Tile, TorchAttention, WindowPlan
from gpu_worker.cpu.chunk_attention import chunk_scratch
from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.numbers import as_array
from gpu_worker.kv.pool import KvPool

# A chunk with at most this many rows runs like decodes. From 4 to 12 rows on, depending on the shapes, the kernel for
# chunks is faster; the products are from 12 on.
KERNEL_ROWS = 8
# Rows of a tile. Products of fewer rows are slower. More rows compute more scores that causal attention does not need.
TILE_ROWS = 64
# The most scores of a tile (rows x keys x KV heads), without the factor for query heads per KV head: so many stay in
# the CPU's cache. Tiles of long sequences have more, because a tile has at least LEAST_TILE_ROWS rows.
TILE_SCORES = 2**19
LEAST_TILE_ROWS = 32


_NO_CHUNKS = np.zeros((0, 4), np.int32)


class KernelChunk(NamedTuple):
    """A chunk that a kernel computes: arguments of attend_chunk()."""

    block_ids: Int32s
    first_row: int
    num_rows: int
    kv_len: int


class PlannedRows(NamedTuple):
    """All rows of a step. block_ids, first_blocks and kv_lens are those of Kernels.attend, for the rows `rows`."""

    block_ids: Int32s
    first_blocks: Int32s
    kv_lens: Int32s
    rows: Int32s  # decodes and short chunks
    chunks: Int32s  # [longer chunks, 4]: place of the block ids, first row, rows, KV length
    packed_keys: np.ndarray  # scratch memory
    seen_values: np.ndarray


class CpuAttention(TorchAttention):
    """The kernel for decodes reads the blocks where they are, because to gather them takes three times as long as a
    decode's attention. `by_row`: all rows are decodes, so that a row's result depends only on its own tokens."""

    reads_whole_blocks = False

    def __init__(self, pool: KvPool, windows: tuple[int, ...], kernels: Kernels, by_row: bool = False) -> None:
        super().__init__(pool, windows, by_row)
        self._kernels = kernels
        self._pool_arrays = [(as_array(k), as_array(v)) for k, v in zip(pool.keys, pool.values, strict=True)]
        assert pool.storage.data_ptr() % 64 == 0, "kernels demand it"
        self._scale = np.float32(self._head_dim**-0.5)
        self._packed_keys = np.empty(0, self._pool_arrays[0][0].dtype)
        self._seen_values = np.empty(0, np.float32)
        self._metadata: AttentionMetadata
        self._by_kernel: tuple[Int32s, Int32s, Int32s, Int32s]
        self._chunks_by_kernel: list[KernelChunk] = []
        self._chunks_at: Int32s = _NO_CHUNKS
        self._no_plans = {window: WindowPlan((), ()) for window in set(windows)}

    def _plan_sequences(self, metadata: AttentionMetadata) -> None:
        """One call takes all decodes and short chunks at once. Their arrays are the same for every window."""
        self._metadata = metadata
        if metadata.num_decodes == metadata.num_sequences:
            numbers = np.arange(metadata.num_decodes, dtype=np.int32)
            self._by_kernel = metadata.kv_indices, metadata.kv_indptr[:-1], metadata.kv_lens(self._block_size), numbers
            self._chunks_by_kernel, self._chunks_at, self._plans = [], _NO_CHUNKS, self._no_plans
            return
        counts = np.diff(metadata.qo_indptr)
        which = np.flatnonzero(np.repeat(counts <= KERNEL_ROWS, counts))
        self._by_kernel = self.tables_of(which)
        has_kernel = self._kernels.attend_chunk is not None
        self._chunks_by_kernel, self._chunks_at = [], _NO_CHUNKS
        if has_kernel:
            self._plan_chunks(metadata)
        shorter = metadata.num_rows if has_kernel else KERNEL_ROWS
        self._plans = {
            window: WindowPlan((), tuple(self._chunks(metadata, window, shorter))) for window in set(self._windows)
        }

    def advance(self, block_table: Int32s, slots: npt.NDArray[np.integer]) -> None:
        _, _, kv_lens, numbers = self._by_kernel
        mapping: np.ndarray = self._slot_mapping.numpy()
        for array in (kv_lens, mapping):
            array += 1
        if not (kv_lens % self._block_size == 1 % self._block_size).any():
            return
        # Some decode begins a block. As step_arrays(), but without Python code per sequence.
        widths = -(-kv_lens // self._block_size)
        ends = np.cumsum(widths)
        firsts = ends - widths
        places = np.arange(ends[-1]) - np.repeat(firsts, widths)
        block_ids = block_table[np.repeat(slots, widths), places]
        mapping[:] = block_ids[ends - 1] * np.int64(self._block_size) + (kv_lens - 1) % self._block_size
        self._by_kernel = block_ids, firsts.astype(np.int32), kv_lens, numbers

    def tables_of(self, which: np.ndarray) -> tuple[Int32s, Int32s, Int32s, Int32s]:
        """Arguments of Kernels.attend for some rows of the step: block_ids, first_blocks, kv_lens and rows."""
        metadata = self._metadata
        owners = np.searchsorted(metadata.qo_indptr, which, side="right") - 1
        # A row sees the tokens up to its own. The sequence's last row sees all.
        kv_lens = metadata.kv_lens(self._block_size)[owners] - (metadata.qo_indptr[owners + 1] - 1 - which)
        arrays = metadata.kv_indices, metadata.kv_indptr[owners], kv_lens, which
        block_ids, first_blocks, kv_lens, rows = (np.ascontiguousarray(array, np.int32) for array in arrays)
        return block_ids, first_blocks, kv_lens, rows

    def _plan_chunks(self, metadata: AttentionMetadata) -> None:
        counts = np.diff(metadata.qo_indptr)
        which = np.flatnonzero(counts > KERNEL_ROWS)
        kv_lens = metadata.kv_lens(self._block_size)[which]
        columns = metadata.kv_indptr[which], metadata.qo_indptr[which], counts[which], kv_lens
        self._chunks_at = np.stack(columns, axis=-1).astype(np.int32)
        block_ids = self._by_kernel[0]
        for first_block, first_row, count, kv_len in self._chunks_at.tolist():
            self._chunks_by_kernel.append(KernelChunk(block_ids[first_block:], first_row, count, kv_len))
            num_keys = max(min(kv_len, count + window - 1) if window else kv_len for window in self._windows)
            size = chunk_scratch(num_keys, self._num_kv_heads, self._head_dim)
            if size > len(self._seen_values):
                self._packed_keys = np.empty(size, self._pool_arrays[0][0].dtype)
                self._seen_values = np.empty(size, np.float32)

    def planned_rows(self, num_rows: int) -> PlannedRows | None:
        """The `num_rows` rows of the step, if kernels compute the attention of all."""
        of_chunks = self._chunks_at[:, 2].sum() if len(self._chunks_at) else 0
        if len(self._by_kernel[-1]) + of_chunks != num_rows:
            return None
        return PlannedRows(*self._by_kernel, self._chunks_at, self._packed_keys, self._seen_values)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [rows]: where the keys and values of each row go."""
        return self._slot_mapping

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kernels.write(as_array(key), as_array(value), self._slot_mapping.numpy(), *self._pool_arrays[layer])
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        window = self._windows[layer]
        inputs = as_array(query), *self._pool_arrays[layer]
        if len(self._by_kernel[-1]):
            self._kernels.attend(*inputs, *self._by_kernel, window, self._scale, as_array(out))
        if (attend_chunk := self._kernels.attend_chunk) is not None:
            for kernel_chunk in self._chunks_by_kernel:
                scratch = self._packed_keys, self._seen_values
                attend_chunk(*inputs, *kernel_chunk, window, self._scale, *scratch, attend_chunk.threads, as_array(out))
        for chunk in self._plans[window].chunks:
            self._prefill(layer, chunk, query, key, value, out)
        return out

    def _causal_tiles(self, count: int) -> Iterator[Tile]:
        return self._tiles(count, 0, 0, 0)

    def _tiles(self, count: int, prefix: int, window: int, first_key: int) -> Iterator[Tile]:
        """Tiles without masks. A tile's last row sees its last key."""
        fitting = TILE_SCORES // (self._num_kv_heads * (prefix + count - first_key))
        size = min(max(fitting, LEAST_TILE_ROWS), TILE_ROWS)
        for top in range(0, count, size):
            bottom = min(top + size, count)
            low = max(first_key, prefix + top - window + 1) if window else first_key
            yield Tile(slice(top, bottom), slice(low - first_key, prefix + bottom - first_key), None)

    def _prefill(self, layer: int, chunk: ChunkPlan, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        window = self._windows[layer]
        # In float32, because products of bfloat16 would round the scores, and take longer in these shapes.
        keys, values = (x[0].float() for x in self._seen(layer, chunk, key, value))
        kv_heads, _, head_dim = keys.shape
        group = query.shape[1] // kv_heads
        query, out = (x[chunk.rows].view(-1, kv_heads, group, head_dim) for x in (query, out))
        # For each KV head its query heads of row 0, of row 1, ...
        folded = query.transpose(0, 1).float().reshape(kv_heads, -1, head_dim)
        tiles: Iterable[Tile] = chunk.tiles
        if not value[chunk.rows].sum().isfinite():  # a later token's weight of 0 times NaN would be NaN
            tiles = (one for tile in chunk.tiles for one in _single_rows(tile, window))
        for tile in tiles:
            head_rows = group * (tile.rows.stop - tile.rows.start)
            rows = folded[:, group * tile.rows.start : group * tile.rows.stop]
            weights = torch.bmm(rows, keys[:, tile.keys].transpose(1, 2))
            self._kernels.mask_softmax(weights.flatten(0, 1).numpy(), head_rows, group, window, self._scale)
            seen = torch.bmm(weights, values[:, tile.keys])
            out[tile.rows].copy_(seen.view(kv_heads, -1, group, head_dim).transpose(0, 1))


def _single_rows(tile: Tile, window: int) -> Iterator[Tile]:
    """The rows of the tile, each with only the keys that it sees."""
    for row in range(tile.rows.start, tile.rows.stop):
        stop = tile.keys.stop - (tile.rows.stop - 1 - row)
        start = max(tile.keys.start, stop - window) if window else tile.keys.start
        yield Tile(slice(row, row + 1), slice(start, stop), None)
