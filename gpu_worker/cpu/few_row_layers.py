"""All layers of a step with a few rows, in one call.

With a few rows, a layer takes a few hundred microseconds. Python needs many of them to call nine kernels, and meanwhile
all cores but one wait. So one function computes a thread's part of all layers, with the functions of the other kernels.
Its threads meet where a part of a layer needs the whole result of the part before (a barrier).

The function is compiled by itself, and a kernel calls it by its address, in several threads. In the kernel, numba would
compile all its code three times.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, prange, threading_layer, types
from numba.core import cgutils
from numba.core.config import NUMBA_NUM_THREADS
from numba.extending import intrinsic
from torch import Tensor

from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.compiling import CompiledKernel, compile_in_child, compiled_function
from gpu_worker.cpu.few_rows import multiply_part
from gpu_worker.cpu.layer_kernels import gated, norm, rotate
from gpu_worker.cpu.matmul import PackedMatmul
from gpu_worker.cpu.narrow_attention import attend_heads_narrow
from gpu_worker.cpu.numbers import FASTMATH, KERNEL_TYPES, as_array, load, store
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.cpu.wide_attention import WIDTH as HEAD_WIDTH
from gpu_worker.cpu.wide_attention import attend_heads_wide
from gpu_worker.kv.pool import KvPool
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.weights import DecoderWeights, LayerWeights
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# With up to so many rows, all layers in one call are faster, on two Zen 4 cores.
MOST_ROWS = 128

# The arguments, by their place in an array: addresses of arrays, then sizes.
(
    HIDDEN,  # [rows, width]
    ANGLES,  # float32 [rows, head_dim]
    SLOTS,  # int64 [rows]: block * block_size + place in the block
    BLOCK_IDS,  # int32 [num_block_ids]
    FIRST_BLOCKS,  # int32 [rows]
    KV_LENS,  # int32 [rows]
    KEYS,  # [layers, blocks, block_size, kv_heads, head_dim]
    VALUES,
    WINDOWS,  # int64 [layers]; 0: none
    LAYERS,  # int64 [layers, NUM_LAYER_ARRAYS]
    PROJECTED,  # scratch memory: [rows, (heads + 2 * kv_heads) * head_dim]
    MIXED,  # [rows, heads * head_dim]
    GATE_UP,  # [rows, 2 * inner]
    ACTIVATED,  # [rows, inner]
    ARRIVED,  # int64 [3], 0 at the start: arrivals at meetings; whether a thread has given up; threads at the end
    NUM_ROWS,
    NUM_BLOCK_IDS,
    NUM_LAYERS,
    NUM_BLOCKS,
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    WIDTH,
    INNER,
) = range(25)
NUM_ARGUMENTS = 25
_STEP_TYPES = np.float32, np.int64, np.int32, np.int32, np.int32  # from ANGLES on
# The arrays of a layer, by their place in a row of LAYERS. 0: the layer has no such array.
INPUT_NORM, QKV, QKV_BIAS, HEAD_NORMS, OUTPUT, MLP_NORM, GATE_UP_MATRIX, DOWN = range(8)
NUM_LAYER_ARRAYS = 8
# The places of float32 arguments.
EPS, SCALE = range(2)

_YIELD_AFTER = 256  # pauses; 7 us on Zen 4. With 4,096, a step beside busy programs takes up to twice as long
_GIVE_UP_AFTER = 2**30  # pauses; half a minute on Zen 4

_norm = njit(fastmath=FASTMATH)(norm)
_rotate = njit(fastmath=FASTMATH)(rotate)


def run_threads(function: Any, like: Any, arguments: Any, numbers: Any, threads: int) -> None:
    """Calls the function at this address in each thread."""
    for thread in prange(threads):
        _call(function, like, arguments, numbers, thread, threads)


def wide_layers(like: Any, arguments: Any, numbers: Any, thread: int, threads: int) -> None:
    """A thread's part of all layers of a model with heads of a multiple of 64. like: a pointer of the model's type."""
    _run_thread(like, arguments, numbers, thread, threads, attend_heads_wide)


def narrow_layers(like: Any, arguments: Any, numbers: Any, thread: int, threads: int) -> None:
    """A thread's part of all layers of any model. like: a pointer of the model's type."""
    _run_thread(like, arguments, numbers, thread, threads, attend_heads_narrow)


@njit(inline="always")
def _run_thread(like: Any, arguments: Any, numbers: Any, thread: int, threads: int, attend_heads: Any) -> None:
    a, singles = carray(arguments, (NUM_ARGUMENTS,)), carray(numbers, (2,))
    like, ints = carray(like, (0,)), np.empty(0, np.int32)
    eps, scale = singles[EPS], singles[SCALE]
    rows, width, inner, head_dim = a[NUM_ROWS], a[WIDTH], a[INNER], a[HEAD_DIM]
    num_heads, kv_heads, num_layers = a[NUM_HEADS], a[NUM_KV_HEADS], a[NUM_LAYERS]
    num_rotated, all_heads = num_heads + kv_heads, num_heads + 2 * kv_heads

    hidden = _array(a[HIDDEN], rows * width, like).reshape(rows, width)
    angles = _array(a[ANGLES], rows * head_dim, singles).reshape(rows, head_dim)
    slots = _array(a[SLOTS], rows, a)
    pool = num_layers, a[NUM_BLOCKS], a[BLOCK_SIZE], kv_heads, head_dim
    size = num_layers * a[NUM_BLOCKS] * a[BLOCK_SIZE] * kv_heads * head_dim
    keys, values = _array(a[KEYS], size, like).reshape(pool), _array(a[VALUES], size, like).reshape(pool)
    block_ids = _array(a[BLOCK_IDS], a[NUM_BLOCK_IDS], ints)
    tables = block_ids, _array(a[FIRST_BLOCKS], rows, ints), _array(a[KV_LENS], rows, ints)
    windows = _array(a[WINDOWS], num_layers, a)
    layers = _array(a[LAYERS], num_layers * NUM_LAYER_ARRAYS, a).reshape(num_layers, NUM_LAYER_ARRAYS)
    projected = _array(a[PROJECTED], rows * all_heads * head_dim, like).reshape(rows, all_heads * head_dim)
    heads = projected.reshape(rows, all_heads, head_dim)
    mixed = _array(a[MIXED], rows * num_heads * head_dim, like).reshape(rows, num_heads * head_dim)
    gate_up = _array(a[GATE_UP], rows * 2 * inner, like).reshape(rows, 2 * inner)
    activated = _array(a[ACTIVATED], rows * inner, like).reshape(rows, inner)
    arrived = _array(a[ARRIVED], 3, a)

    normed, empty = np.empty_like(hidden), like[:0]
    begin, end = rows * thread // threads, rows * (thread + 1) // threads
    meetings = 0
    for index in range(num_layers):
        layer = layers[index]
        # Each thread has all normed rows for itself: for a few rows, a meeting would take longer.
        _norm(hidden, _array(layer[INPUT_NORM], width, like), eps, normed)
        bias = _array(layer[QKV_BIAS], projected.shape[1] if layer[QKV_BIAS] else 0, like)
        qkv = _array(layer[QKV], width * projected.shape[1], like)
        multiply_part(normed, qkv, bias, False, thread, threads, projected)
        meetings = _meet(arrived, threads, meetings)

        has_norms = layer[HEAD_NORMS] != 0
        norms = _array(layer[HEAD_NORMS] if has_norms else layer[INPUT_NORM], 2 * head_dim, like)
        norms = norms.reshape(2, head_dim)
        _rotate(heads[begin:end], num_rotated, angles[begin:end], has_norms, norms, num_heads, eps)
        _write_kv(heads[begin:end], num_heads, slots[begin:end], keys[index], values[index])
        meetings = _meet(arrived, threads, meetings)

        queries, window = heads[:, :num_heads], windows[index]
        _attend_part(queries, keys[index], values[index], tables, window, scale, thread, threads, attend_heads, mixed)
        meetings = _meet(arrived, threads, meetings)

        output = _array(layer[OUTPUT], width * mixed.shape[1], like)
        multiply_part(mixed, output, empty, True, thread, threads, hidden)
        meetings = _meet(arrived, threads, meetings)

        _norm(hidden, _array(layer[MLP_NORM], width, like), eps, normed)
        matrix = _array(layer[GATE_UP_MATRIX], width * 2 * inner, like)
        multiply_part(normed, matrix, empty, False, thread, threads, gate_up)
        meetings = _meet(arrived, threads, meetings)

        _gate_part(gate_up, thread, threads, activated)
        meetings = _meet(arrived, threads, meetings)

        down = _array(layer[DOWN], width * inner, like)
        multiply_part(activated, down, empty, True, thread, threads, hidden)
        meetings = _meet(arrived, threads, meetings)
    _arrive(arrived[2:])


@njit(inline="always")
def _write_kv(heads: Any, num_heads: int, slots: Any, keys: Any, values: Any) -> None:
    block_size, kv_heads, head_dim = keys.shape[1:]
    for row in range(len(heads)):
        block, token = slots[row] // block_size, slots[row] % block_size
        for k in range(kv_heads):
            for d in range(head_dim):
                keys[block, token, k, d] = heads[row, num_heads + k, d]
                values[block, token, k, d] = heads[row, num_heads + kv_heads + k, d]


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
    block_ids, first_blocks, kv_lens = tables
    kv_heads = keys.shape[2]
    count = len(kv_lens) * kv_heads
    begin, end = count * thread // threads, count * (thread + 1) // threads
    for row in range(begin // kv_heads, len(kv_lens)):
        first, last = max(begin - row * kv_heads, 0), min(end - row * kv_heads, kv_heads)
        if last <= first:
            break
        table = block_ids[first_blocks[row] :]
        attend_heads(query, row, keys, values, table, kv_lens[row], window, scale, first, last, out)


@njit(fastmath=FASTMATH)
def _gate_part(gate_up: Any, thread: int, threads: int, out: Any) -> None:
    """A thread's part of out = silu(gate) * up."""
    width = out.shape[1]
    for row in range(len(out)):
        for d in range(width * thread // threads, width * (thread + 1) // threads):
            store(out, (row, d), gated(load(gate_up[row, d]), load(gate_up[row, width + d])))


@njit(inline="always")
def _meet(arrived: Any, threads: int, meetings: int) -> int:
    """Wait for all threads. Returns the number of meetings so far, this one included."""
    meetings += 1
    if threads > 1:
        _arrive(arrived)
        pauses = 0
        while _num_arrived(arrived) < threads * meetings and not arrived[1]:
            _pause()
            pauses += 1
            if pauses % _YIELD_AFTER == 0:  # the other thread may need this core
                _let_others_run()
            if pauses == _GIVE_UP_AFTER:  # OpenMP runs the threads one after another
                arrived[1] = 1
    return meetings


@njit(inline="always")
def _array(address: int, size: int, like: Any) -> Any:
    """The array of `size` elements at an address, of the type of the array `like`."""
    return carray(_pointer(address, like), (size,))


@intrinsic
def _pointer(_context: Any, _address: Any, like: Any) -> Any:
    """In a kernel: an address, as a pointer to elements of the type of the array `like`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), build


@intrinsic
def _call(
    _context: Any, _function: Any, _like: Any, _arguments: Any, _numbers: Any, _thread: Any, _threads: Any
) -> Any:
    """In a kernel: call the function at an address, with the arguments of wide_layers(). Pointers are addresses."""

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), build


@intrinsic
def _arrive(_context: Any, arrived: Any) -> Any:
    """In a kernel: add 1 to an int64 array's first element, after everything that this thread has written."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.atomic_rmw("add", data, ir.IntType(64)(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(arrived), build


@intrinsic
def _num_arrived(_context: Any, arrived: Any) -> Any:
    """In a kernel: an int64 array's first element, before everything that this thread reads later."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(arrived), build


@intrinsic
def _pause(_context: Any) -> Any:
    """In a kernel: tell the processor that this thread only waits."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _let_others_run(_context: Any) -> Any:
    """In a kernel: the operating system may run another thread on this core (sched_yield)."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), build


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


class FewRowLayers:
    """All layers of a decoder for up to MOST_ROWS rows. A row's result depends only on the row's own inputs, bit for
    bit."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: list[list[np.ndarray | None]],
        pool: KvPool,
        attention: CpuAttention,
        threads: int,
    ) -> None:
        """layers: for each layer, its arrays in the order of LAYERS. The caller keeps the weights in memory."""
        dtype = pool.storage.dtype
        number = as_array(pool.keys).dtype
        assert all(a.dtype == number and a.flags.c_contiguous for layer in layers for a in layer if a is not None)
        self._attention = attention
        self._function = compiled_layers(dtype, wide_heads=config.head_dim % HEAD_WIDTH == 0)
        self._run = CompiledKernel(run_threads, (types.intp,) * 5, threads, least=0)
        addresses = [[0 if array is None else array.ctypes.data for array in layer] for layer in layers]

        def scratch(width: int) -> np.ndarray:
            return as_array(torch.empty(MOST_ROWS, width, dtype=dtype))

        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._arrived = np.zeros(3, np.int64)
        fixed = {
            KEYS: as_array(pool.keys),
            VALUES: as_array(pool.values),
            WINDOWS: np.array(config.windows, np.int64),
            LAYERS: np.array(addresses, np.int64),
            PROJECTED: scratch(query_size + 2 * kv_size),
            MIXED: scratch(query_size),
            GATE_UP: scratch(2 * config.intermediate_size),
            ACTIVATED: scratch(config.intermediate_size),
            ARRIVED: self._arrived,
        }
        self._numbers = np.array([config.rms_norm_eps, config.head_dim**-0.5], np.float32)
        self._arguments = np.zeros(NUM_ARGUMENTS, np.int64)
        for place, array in fixed.items():
            self._arguments[place] = array.ctypes.data
        sizes = {
            NUM_LAYERS: config.num_layers,
            NUM_BLOCKS: pool.keys.shape[1],
            BLOCK_SIZE: pool.block_size,
            NUM_HEADS: config.num_heads,
            NUM_KV_HEADS: config.num_kv_heads,
            HEAD_DIM: config.head_dim,
            WIDTH: config.hidden_size,
            INNER: config.intermediate_size,
        }
        for place, size in sizes.items():
            self._arguments[place] = size
        self._kept = layers, fixed  # the function has addresses alone
        self._addresses = self._function.address, self._arguments.ctypes.data, self._numbers.ctypes.data

    def run(self, hidden: Tensor, angles: np.ndarray) -> bool:
        """Run all layers on `hidden` [rows, hidden size], in place. False, and nothing is done, if the step has too
        many rows or a long chunk."""
        num_rows = len(hidden)
        if num_rows > MOST_ROWS or (tables := self._attention.planned_rows(num_rows)) is None:
            return False
        arrays = angles, self._attention.slot_mapping.numpy(), *tables
        for place, (array, number) in enumerate(zip(arrays, _STEP_TYPES, strict=True), ANGLES):
            assert array.dtype == number
            assert array.flags.c_contiguous
            self._arguments[place] = array.ctypes.data
        self._arguments[HIDDEN] = hidden.data_ptr()
        self._arguments[NUM_ROWS], self._arguments[NUM_BLOCK_IDS] = num_rows, len(tables[0])
        self._arrived[:] = 0
        function, arguments, numbers = self._addresses
        like = arguments  # for its type; nothing reads this pointer
        self._run(function, like, arguments, numbers, self._run.threads)
        if self._arrived[1]:
            raise RuntimeError("the threads of a step do not run at the same time: check the OMP_ variables")
        if self._arrived[2] < self._run.threads:  # numba has logged why
            raise RuntimeError("a thread of a step has failed")
        return True


def few_row_layers(
    config: DecoderConfig,
    weights: DecoderWeights,
    pool: KvPool,
    attention: CpuAttention,
    ops: CpuOps,
    matmul: PackedMatmul,
    threads: int,
) -> FewRowLayers | None:
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
    return FewRowLayers(config, layers, pool, attention, threads)


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
