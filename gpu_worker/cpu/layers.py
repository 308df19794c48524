"""All layers of a step in one call.

With a few rows, a layer takes a few hundred microseconds. Python needs many of them to call nine kernels, and meanwhile
all cores but one wait. So one function computes a thread's part of all layers, with the functions of the other kernels.
Its threads meet where a part of a layer needs the whole result of the part before (a barrier).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numba import carray, njit, threading_layer, types
from numba.core.config import NUMBA_NUM_THREADS
from torch import Tensor

from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.chunk_attention import attend_part, pack_part
from gpu_worker.cpu.compiling import CompiledKernel, compile_in_child, compiled_function
from gpu_worker.cpu.decode_attention import WIDTH as HEAD_WIDTH
from gpu_worker.cpu.decode_attention import attend_heads_narrow, attend_heads_wide
from gpu_worker.cpu.layer_kernels import gated, norm, rotate, write
from gpu_worker.cpu.matmul import PackedMatmul
from gpu_worker.cpu.numbers import FASTMATH, KERNEL_TYPES, as_array, load, store
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.cpu.products import MOST_ROWS as MOST_HEAD_ROWS
from gpu_worker.cpu.products import MOST_TABLE_ROWS, multiply_part, multiply_table_part
from gpu_worker.cpu.threads import array_at, arrive, meet, run_threads
from gpu_worker.kv.pool import KvPool
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.weights import DecoderWeights, LayerWeights
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# With up to so many rows, each thread computes the norms of all rows for itself, because a meeting takes longer.
_OWN_NORMS = 32

# The arguments, by their place in an array: addresses of arrays, then sizes.
(
    TOKENS,  # int64 [rows]; without layers, HIDDEN is given instead, and only LOGITS are computed
    POSITIONS,  # int64 [rows]
    SLOTS,  # int64 [rows]: block * block_size + place in the block
    BLOCK_IDS,  # int32 [num_block_ids]
    FIRST_BLOCKS,  # int32 [num_attending]
    KV_LENS,  # int32 [num_attending]
    ROWS,  # int32 [num_attending]: rows that decode attention computes, each by itself
    CHUNKS,  # int32 [num_chunks, 4]: of PlannedRows
    PACKED_KEYS,  # its scratch memory
    SEEN_VALUES,
    WANTED,  # int64 [num_wanted]: the rows of the result
    HIDDEN,  # the result: [num_wanted, width]
    LOGITS,  # another result: [rows, vocab]; 0: none
    EMBEDDING,  # [vocab, width]
    TURNS,  # float32 [positions, head_dim]
    FINAL_NORM,  # [width]
    HEAD,  # a packed matrix, or [vocab, width] with HEAD_IS_TABLE
    KEYS,  # [layers, blocks, block_size, kv_heads, head_dim]
    VALUES,
    WINDOWS,  # int64 [layers]; 0: none
    LAYERS,  # int64 [layers, NUM_LAYER_ARRAYS]
    STREAM,  # scratch memory: [rows, width], hidden states; without WANTED, this is HIDDEN
    NORMED,  # [rows, width]
    PROJECTED,  # [rows, (heads + 2 * kv_heads) * head_dim]
    MIXED,  # [rows, heads * head_dim]
    GATE_UP,  # [rows, 2 * inner]
    ACTIVATED,  # [rows, inner]
    ARRIVED,  # int64 [3], 0 at the start: arrivals at meetings; whether a thread has given up; threads at the end
    NUM_ROWS,
    NUM_ATTENDING,
    NUM_CHUNKS,
    NUM_WANTED,
    NUM_BLOCK_IDS,
    NUM_SCRATCH,  # elements of PACKED_KEYS and of SEEN_VALUES
    NUM_LAYERS,
    NUM_BLOCKS,
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    WIDTH,
    INNER,
    VOCAB,
    NUM_POSITIONS,
    HEAD_IS_TABLE,
) = range(45)
NUM_ARGUMENTS = 45
# The arrays of a layer, by their place in a row of LAYERS. 0: the layer has no such array.
INPUT_NORM, QKV, QKV_BIAS, HEAD_NORMS, OUTPUT, MLP_NORM, GATE_UP_MATRIX, DOWN = range(8)
NUM_LAYER_ARRAYS = 8
# The places of float32 arguments.
EPS, SCALE = range(2)

_norm = njit(fastmath=FASTMATH)(norm)
_rotate = njit(fastmath=FASTMATH)(rotate)
_write = njit(fastmath=FASTMATH)(write)


def wide_layers(like: Any, arguments: Any, numbers: Any, thread: int, threads: int) -> None:
    """A thread's part of all layers of a model with heads of a multiple of 64. like: a pointer of the model's type."""
    _run_thread(like, arguments, numbers, thread, threads, attend_heads_wide, _attend_chunk)


def narrow_layers(like: Any, arguments: Any, numbers: Any, thread: int, threads: int) -> None:
    """A thread's part of all layers of any model, without longer chunks. like: a pointer of the model's type."""
    _run_thread(like, arguments, numbers, thread, threads, attend_heads_narrow, _attend_no_chunk)


@njit(inline="always")
def _run_thread(
    like: Any, arguments: Any, numbers: Any, thread: int, threads: int, attend_heads: Any, attend_chunk: Any
) -> None:
    a, singles = carray(arguments, (NUM_ARGUMENTS,)), carray(numbers, (2,))
    like, ints = carray(like, (0,)), np.empty(0, np.int32)
    eps, scale = singles[EPS], singles[SCALE]
    rows, width, inner, head_dim = a[NUM_ROWS], a[WIDTH], a[INNER], a[HEAD_DIM]
    num_heads, kv_heads, num_layers = a[NUM_HEADS], a[NUM_KV_HEADS], a[NUM_LAYERS]
    num_rotated, all_heads = num_heads + kv_heads, num_heads + 2 * kv_heads

    tokens, positions = array_at(a[TOKENS], rows, a), array_at(a[POSITIONS], rows, a)
    embedding = array_at(a[EMBEDDING], a[VOCAB] * width, like).reshape(a[VOCAB], width)
    turns = array_at(a[TURNS], a[NUM_POSITIONS] * head_dim, singles).reshape(a[NUM_POSITIONS], head_dim)
    slots = array_at(a[SLOTS], rows, a)
    result = array_at(a[HIDDEN], a[NUM_WANTED] * width, like).reshape(a[NUM_WANTED], width)
    hidden = array_at(a[STREAM], rows * width, like).reshape(rows, width)
    pool = num_layers, a[NUM_BLOCKS], a[BLOCK_SIZE], kv_heads, head_dim
    size = num_layers * a[NUM_BLOCKS] * a[BLOCK_SIZE] * kv_heads * head_dim
    keys, values = array_at(a[KEYS], size, like).reshape(pool), array_at(a[VALUES], size, like).reshape(pool)
    block_ids, which = array_at(a[BLOCK_IDS], a[NUM_BLOCK_IDS], ints), array_at(a[ROWS], a[NUM_ATTENDING], ints)
    kv_lens = array_at(a[KV_LENS], a[NUM_ATTENDING], ints)
    tables = block_ids, array_at(a[FIRST_BLOCKS], a[NUM_ATTENDING], ints), kv_lens, which
    chunks = array_at(a[CHUNKS], a[NUM_CHUNKS] * 4, ints).reshape(a[NUM_CHUNKS], 4)
    packed = array_at(a[PACKED_KEYS], a[NUM_SCRATCH], like), array_at(a[SEEN_VALUES], a[NUM_SCRATCH], singles)
    windows = array_at(a[WINDOWS], num_layers, a)
    layers = array_at(a[LAYERS], num_layers * NUM_LAYER_ARRAYS, a).reshape(num_layers, NUM_LAYER_ARRAYS)
    projected = array_at(a[PROJECTED], rows * all_heads * head_dim, like).reshape(rows, all_heads * head_dim)
    heads = projected.reshape(rows, all_heads, head_dim)
    mixed = array_at(a[MIXED], rows * num_heads * head_dim, like).reshape(rows, num_heads * head_dim)

    empty = like[:0]
    begin, end = rows * thread // threads, rows * (thread + 1) // threads
    angles = np.empty((end - begin, head_dim), np.float32)
    meetings = 0
    if num_layers:
        _copy_rows(turns, positions[begin:end], angles)
        _copy_rows(embedding, tokens[begin:end], hidden[begin:end])
        meetings = meet(_arrived(a), threads, meetings)
    for index in range(num_layers):
        layer = layers[index]
        normed, meetings = _normed(a, hidden, layer[INPUT_NORM], eps, thread, threads, meetings)
        bias = array_at(layer[QKV_BIAS], projected.shape[1] if layer[QKV_BIAS] else 0, like)
        qkv = array_at(layer[QKV], width * projected.shape[1], like)
        multiply_part(normed, qkv, bias, False, thread, threads, projected)
        meetings = meet(_arrived(a), threads, meetings)

        has_norms = layer[HEAD_NORMS] != 0
        norms = array_at(layer[HEAD_NORMS] if has_norms else layer[INPUT_NORM], 2 * head_dim, like)
        norms = norms.reshape(2, head_dim)
        _rotate(heads[begin:end], num_rotated, angles, has_norms, norms, num_heads, eps)
        own = heads[begin:end]
        _write(own[:, num_heads:num_rotated], own[:, num_rotated:], slots[begin:end], keys[index], values[index])
        meetings = meet(_arrived(a), threads, meetings)

        queries, window = heads[:, :num_heads], windows[index]
        _attend_part(queries, keys[index], values[index], tables, window, scale, thread, threads, attend_heads, mixed)
        for number in range(len(chunks)):
            chunk = block_ids, chunks[number]
            pool_part = keys[index], values[index]
            meetings = attend_chunk(
                queries, pool_part, chunk, window, scale, packed, thread, threads, _arrived(a), meetings, mixed
            )
        meetings = meet(_arrived(a), threads, meetings)

        if index == num_layers - 1 and a[WANTED]:  # nothing reads the other rows
            wanted = array_at(a[WANTED], len(result), a)
            first, last = len(result) * thread // threads, len(result) * (thread + 1) // threads
            kept = array_at(a[PROJECTED], len(result) * mixed.shape[1], like).reshape(len(result), mixed.shape[1])
            _copy_rows(hidden, wanted[first:last], result[first:last])
            _copy_rows(mixed, wanted[first:last], kept[first:last])
            meetings = meet(_arrived(a), threads, meetings)
            hidden, mixed = result, kept

        output = array_at(layer[OUTPUT], width * mixed.shape[1], like)
        multiply_part(mixed, output, empty, True, thread, threads, hidden)
        meetings = meet(_arrived(a), threads, meetings)

        normed, meetings = _normed(a, hidden, layer[MLP_NORM], eps, thread, threads, meetings)
        matrix = array_at(layer[GATE_UP_MATRIX], width * 2 * inner, like)
        gate_up = array_at(a[GATE_UP], len(hidden) * 2 * inner, like).reshape(len(hidden), 2 * inner)
        multiply_part(normed, matrix, empty, False, thread, threads, gate_up)
        meetings = meet(_arrived(a), threads, meetings)

        activated = array_at(a[ACTIVATED], len(hidden) * inner, like).reshape(len(hidden), inner)
        _gate_part(gate_up, thread, threads, activated)
        meetings = meet(_arrived(a), threads, meetings)

        down = array_at(layer[DOWN], width * inner, like)
        multiply_part(activated, down, empty, True, thread, threads, hidden)
        meetings = meet(_arrived(a), threads, meetings)
    if a[LOGITS]:
        normed, meetings = _normed(a, result, a[FINAL_NORM], eps, thread, threads, meetings)
        head = array_at(a[HEAD], width * a[VOCAB], like)
        logits = array_at(a[LOGITS], len(result) * a[VOCAB], like).reshape(len(result), a[VOCAB])
        if a[HEAD_IS_TABLE]:
            multiply_table_part(normed, head.reshape(a[VOCAB], width), thread, threads, logits)
        else:
            multiply_part(normed, head, empty, False, thread, threads, logits)
    arrive(_arrived(a)[2:])


@njit(inline="always")
def _arrived(a: Any) -> Any:
    return array_at(a[ARRIVED], 3, a)


@njit(inline="always")
def _normed(a: Any, hidden: Any, weight: int, eps: float, thread: int, threads: int, meetings: int) -> Any:
    """All normed rows, and the number of meetings."""
    count, width = hidden.shape
    if count <= _OWN_NORMS:
        normed = np.empty_like(hidden)
        _norm(hidden, array_at(weight, width, hidden), eps, normed)
        return normed, meetings
    normed = array_at(a[NORMED], count * width, hidden).reshape(count, width)
    begin, end = count * thread // threads, count * (thread + 1) // threads
    _norm(hidden[begin:end], array_at(weight, width, hidden), eps, normed[begin:end])
    return normed, meet(_arrived(a), threads, meetings)


@njit(inline="always")
def _copy_rows(table: Any, which: Any, out: Any) -> None:
    for row in range(len(which)):
        for d in range(out.shape[1]):
            out[row, d] = table[which[row], d]


@njit(inline="always")
def _attend_part(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    window: int,
    scale: float,
    thread: int,
    threads: int,
    attend_heads: Any,
    out: Any,
) -> None:
    """A thread's part of the KV heads of all rows: of most rows all or none, as they are side by side in memory."""
    block_ids, first_blocks, kv_lens, rows = tables
    kv_heads = keys.shape[2]
    count = len(kv_lens) * kv_heads
    begin, end = count * thread // threads, count * (thread + 1) // threads
    for i in range(begin // kv_heads, len(kv_lens)):
        first, last = max(begin - i * kv_heads, 0), min(end - i * kv_heads, kv_heads)
        if last <= first:
            break
        table = block_ids[first_blocks[i] :]
        attend_heads(query, rows[i], keys, values, table, kv_lens[i], window, scale, first, last, out)


@njit(inline="always")
def _attend_chunk(
    query: Any,
    pool: Any,
    chunk: Any,
    window: int,
    scale: float,
    scratch: Any,
    thread: int,
    threads: int,
    arrived: Any,
    meetings: int,
    out: Any,
) -> int:
    """A thread's part of a chunk's attention. Returns the number of meetings."""
    (keys, values), (block_ids, sizes), (packed, seen) = pool, chunk, scratch
    first_block, first_row, count, kv_len = sizes[0], sizes[1], sizes[2], sizes[3]
    meetings = meet(arrived, threads, meetings)  # the scratch memory is free
    pack_part(keys, values, block_ids[first_block:], count, kv_len, window, thread, threads, packed, seen)
    meetings = meet(arrived, threads, meetings)
    attend_part(query, keys, first_row, count, kv_len, window, scale, packed, seen, thread, threads, out)
    return meetings


@njit(inline="always")
def _attend_no_chunk(
    query: Any,
    pool: Any,
    chunk: Any,
    window: int,
    scale: float,
    scratch: Any,
    thread: int,
    threads: int,
    arrived: Any,
    meetings: int,
    out: Any,
) -> int:
    return meetings


@njit(fastmath=FASTMATH)
def _gate_part(gate_up: Any, thread: int, threads: int, out: Any) -> None:
    """A thread's part of out = silu(gate) * up."""
    (count, width), first, last = out.shape, 0, len(out)
    begin, end = width * thread // threads, width * (thread + 1) // threads
    if count > _OWN_NORMS:
        begin, end, first, last = 0, width, count * thread // threads, count * (thread + 1) // threads
    for row in range(first, last):
        gate, up, own = gate_up[row, begin:end], gate_up[row, width + begin : width + end], out[row, begin:end]
        for d in range(end - begin):
            store(own, d, gated(load(gate[d]), load(up[d])))


def compiled_layers(dtype: torch.dtype, wide_heads: bool, compiles_here: bool = False) -> Any:
    """The function for models of this type. `wide_heads`, `compiles_here`: as of Kernels."""
    function = wide_layers if wide_heads else narrow_layers
    pointers = types.CPointer(KERNEL_TYPES[dtype]), types.CPointer(types.int64), types.CPointer(types.float32)
    arguments = (*pointers, types.intp, types.intp)
    began_s = time.monotonic()
    if not compiles_here:
        made = f"compiled_layers({dtype}, {wide_heads}, compiles_here=True)"
        compile_in_child(function, f"import torch; from {__name__} import compiled_layers; {made}")
    compiled = compiled_function(function, arguments)
    _log.info("the function for all layers is ready", seconds=round(time.monotonic() - began_s, 1))
    return compiled


class CpuLayers:
    """All layers of a decoder. A row's result depends only on the row's own inputs, bit for bit; in a longer chunk also
    on the chunk."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: list[list[np.ndarray | None]],
        embedding: np.ndarray,
        final_norm: np.ndarray,
        head: np.ndarray | None,
        pool: KvPool,
        attention: CpuAttention,
        turns: np.ndarray,
        threads: int,
    ) -> None:
        """layers: for each layer, its arrays in the order of LAYERS. head: what PackedMatmul.memory() returns. The
        caller keeps the weights in memory."""
        dtype = pool.storage.dtype
        number = as_array(pool.keys).dtype
        weights = [embedding, final_norm, *([] if head is None else [head])]
        weights += [array for layer in layers for array in layer if array is not None]
        assert all(array.dtype == number and array.flags.c_contiguous for array in weights)
        assert turns.dtype == np.float32
        assert turns.flags.c_contiguous
        self._attention = attention
        self._function = compiled_layers(dtype, wide_heads=config.head_dim % HEAD_WIDTH == 0)
        self._run = CompiledKernel(run_threads, (types.intp,) * 5, threads, least=0)
        self._most_logits = 0 if head is None else MOST_TABLE_ROWS if head.ndim == 2 else MOST_HEAD_ROWS
        self._num_layers, self._vocab, self._hidden_size = config.num_layers, config.vocab_size, config.hidden_size
        assert len(embedding) == self._vocab
        addresses = [[0 if array is None else array.ctypes.data for array in layer] for layer in layers]

        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._scratch_widths = {
            STREAM: config.hidden_size,
            NORMED: config.hidden_size,
            PROJECTED: query_size + 2 * kv_size,
            MIXED: query_size,
            GATE_UP: 2 * config.intermediate_size,
            ACTIVATED: config.intermediate_size,
        }
        self._scratch: dict[int, Tensor] = {}
        self._scratch_rows = 0
        self._arrived = np.zeros(3, np.int64)
        fixed = {
            EMBEDDING: embedding,
            TURNS: turns,
            FINAL_NORM: final_norm,
            KEYS: as_array(pool.keys),
            VALUES: as_array(pool.values),
            WINDOWS: np.array(config.windows, np.int64),
            LAYERS: np.array(addresses, np.int64),
            ARRIVED: self._arrived,
        }
        if head is not None:
            fixed[HEAD] = head
        self._numbers = np.array([config.rms_norm_eps, config.head_dim**-0.5], np.float32)
        self._arguments = np.zeros(NUM_ARGUMENTS, np.int64)
        for place, array in fixed.items():
            self._arguments[place] = array.ctypes.data
        sizes = {
            NUM_BLOCKS: pool.keys.shape[1],
            BLOCK_SIZE: pool.block_size,
            NUM_HEADS: config.num_heads,
            NUM_KV_HEADS: config.num_kv_heads,
            HEAD_DIM: config.head_dim,
            WIDTH: config.hidden_size,
            INNER: config.intermediate_size,
            VOCAB: len(embedding),
            NUM_POSITIONS: len(turns),
            HEAD_IS_TABLE: head is not None and head.ndim == 2,
        }
        for place, size in sizes.items():
            self._arguments[place] = size
        self._kept = layers, fixed  # the function has addresses alone
        self._addresses = self._function.address, self._arguments.ctypes.data, self._numbers.ctypes.data

    def run(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None = None) -> Tensor | None:
        """Hidden states [wanted rows, hidden size] after all layers. None, and nothing is done, if no kernel computes
        the attention of a chunk. tokens, positions: int64 [rows], of the vocabulary and of the table of turns. wanted:
        int64, the rows of the result; None: all."""
        return self._compute(tokens, positions, wanted, None)

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """As run(), but logits [rows, vocab]. None also if the kernels cannot read the head, or for many rows."""
        if len(tokens) > self._most_logits:
            return None
        logits = torch.empty(len(tokens), self._vocab, dtype=self._attention.dtype)
        return None if self._compute(tokens, positions, None, logits) is None else logits

    def head(self, hidden: Tensor) -> Tensor | None:
        """Logits [rows, vocab] of hidden states from run(): of a row the same bits as from logits(). None if that would
        be None, too."""
        if not 0 < len(hidden) <= self._most_logits:
            return None
        assert hidden.is_contiguous()
        assert hidden.dtype == self._attention.dtype
        logits = torch.empty(len(hidden), self._vocab, dtype=self._attention.dtype)
        self._arguments[NUM_LAYERS] = 0
        self._call(len(hidden), None, hidden, logits)
        return logits

    def _compute(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor | None, logits: Tensor | None
    ) -> Tensor | None:
        if (planned := self._attention.planned_rows(len(tokens))) is None:
            return None
        arrays = {
            TOKENS: tokens.numpy(),
            POSITIONS: positions.numpy(),
            SLOTS: self._attention.slot_mapping.numpy(),
            BLOCK_IDS: planned.block_ids,
            FIRST_BLOCKS: planned.first_blocks,
            KV_LENS: planned.kv_lens,
            ROWS: planned.rows,
            CHUNKS: planned.chunks,
            PACKED_KEYS: planned.packed_keys,
            SEEN_VALUES: planned.seen_values,
        }
        for place, array in arrays.items():
            assert array.flags.c_contiguous
            assert array.dtype == np.int64 if place <= SLOTS else array.dtype == np.int32 or place > CHUNKS
            self._arguments[place] = array.ctypes.data
        self._arguments[NUM_BLOCK_IDS] = len(planned.block_ids)
        self._arguments[NUM_ATTENDING], self._arguments[NUM_CHUNKS] = len(planned.rows), len(planned.chunks)
        self._arguments[NUM_SCRATCH] = len(planned.seen_values)
        self._arguments[NUM_LAYERS] = self._num_layers
        count = len(tokens) if wanted is None else len(wanted)
        hidden = torch.empty(count, self._hidden_size, dtype=self._attention.dtype)
        self._call(len(tokens), wanted, hidden, logits)
        return hidden

    def _call(self, num_rows: int, wanted: Tensor | None, hidden: Tensor, logits: Tensor | None) -> None:
        if num_rows > self._scratch_rows:
            self._scratch_rows = num_rows
            for place, width in self._scratch_widths.items():
                self._scratch[place] = torch.empty(num_rows, width, dtype=self._attention.dtype)
        for place, tensor in self._scratch.items():
            self._arguments[place] = tensor.data_ptr()
        self._arguments[HIDDEN] = hidden.data_ptr()
        if wanted is None:
            self._arguments[STREAM] = hidden.data_ptr()
        self._arguments[WANTED] = 0 if wanted is None else wanted.data_ptr()
        self._arguments[LOGITS] = 0 if logits is None else logits.data_ptr()
        self._arguments[NUM_ROWS], self._arguments[NUM_WANTED] = num_rows, len(hidden)
        self._arrived[:] = 0
        function, arguments, numbers = self._addresses
        like = arguments  # for its type; nothing reads this pointer
        self._run(function, like, arguments, numbers, self._run.threads)
        if self._arrived[1]:
            raise RuntimeError("the threads of a step do not run at the same time: check the OMP_ variables")
        if self._arrived[2] < self._run.threads:  # numba has logged why
            raise RuntimeError("a thread of a step has failed")


def cpu_layers(
    config: DecoderConfig,
    weights: DecoderWeights,
    pool: KvPool,
    attention: CpuAttention,
    ops: CpuOps,
    matmul: PackedMatmul,
    threads: int,
) -> CpuLayers | None:
    """None if the function cannot compute this model. `matmul`: with kernels for a few rows."""
    if config.output_bias:
        return None
    layers = [_arrays_of(layer, ops, matmul) for layer in weights.layers]
    needed = QKV, OUTPUT, GATE_UP_MATRIX, DOWN
    if any(layer[place] is None for layer in layers for place in needed):
        return None
    # numba knows its threading layer only if it has more than one thread. TBB may run the threads one after another.
    if min(threads, NUMBA_NUM_THREADS) > 1 and threading_layer() == "tbb":
        return None
    embedding, head = weights.embedding, weights.head
    if not (isinstance(embedding, Tensor) and isinstance(head, Tensor)):
        return None
    head_memory = matmul.memory(head, weights.final_norm.dtype) if config.has_head else None
    tables = as_array(embedding), as_array(weights.final_norm), head_memory
    return CpuLayers(config, layers, *tables, pool, attention, ops.turns, threads)


def _arrays_of(layer: LayerWeights, ops: CpuOps, matmul: PackedMatmul) -> list[np.ndarray | None]:
    arrays: list[np.ndarray | None] = [None] * NUM_LAYER_ARRAYS
    matrices = {QKV: layer.qkv, OUTPUT: layer.output, GATE_UP_MATRIX: layer.gate_up, DOWN: layer.down}
    for place, matrix in matrices.items():
        if isinstance(matrix, Tensor) and matrix.is_mkldnn:
            arrays[place] = matmul.memory(matrix, layer.input_norm.dtype)
    arrays[INPUT_NORM], arrays[MLP_NORM] = as_array(layer.input_norm), as_array(layer.mlp_norm)
    if layer.qkv_bias is not None:
        arrays[QKV_BIAS] = as_array(layer.qkv_bias)
    if layer.query_norm is not None and layer.key_norm is not None:
        arrays[HEAD_NORMS] = ops.norms_of(layer.query_norm, layer.key_norm)
    return arrays
