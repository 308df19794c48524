"""All layers of a step in one call.

With a few rows, a layer takes a few hundred microseconds. Python needs many of them to call nine kernels, and meanwhile
all cores but one wait; with many rows, this is a tenth of the time. So one function computes a thread's part of all
layers, with the functions of the other kernels. Its threads meet where a part of a layer needs the whole result of the
part before (a barrier).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from numba import threading_layer, types
from numba.core.config import NUMBA_NUM_THREADS
from torch import Tensor

from gpu_worker.cpu.attention import CpuAttention, PlannedRows
from gpu_worker.cpu.compiling import CompiledKernel, compile_in_child, compiled_function
from gpu_worker.cpu.huge_pages import use_huge_pages
from gpu_worker.cpu.layers import arguments as at
from gpu_worker.cpu.layers.function import all_layers
from gpu_worker.cpu.layers.logit_bounds import LogitBounds, logit_bounds
from gpu_worker.cpu.layers.one_row import ThreadsOfOneRow
from gpu_worker.cpu.matmul import PackedMatmul
from gpu_worker.cpu.numbers import KERNEL_TYPES, as_array
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.cpu.products import MOST_ROWS as MOST_HEAD_ROWS
from gpu_worker.cpu.products import MOST_TABLE_ROWS
from gpu_worker.cpu.threads import COUNTER, run_threads
from gpu_worker.cpu.vectors import OUTPUTS
from gpu_worker.kv.pool import KvPool
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.decoder import nothing
from gpu_worker.models.weights import DecoderWeights, LayerWeights
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# The last layer computes attention for the wanted rows alone, each by itself, if these are at most one of so many rows,
_FEW_WANTED = 4
# and not many more than so many of each longer chunk: the attention of a whole chunk takes less time per row.
_FEW_OF_CHUNK = 2
# Before both are tried, a step of one row that reads no more than this of weights, keys and values takes one of two
# threads (docs/adr/0001).
_MOST_BYTES_ALONE = 192 << 20
# If bounds leave more than one of so many blocks, all logits take less time. So many calls then do without bounds.
_FEW_BLOCKS, _CALLS_WITHOUT = 4, 100


def compile_layers(dtype: torch.dtype) -> None:
    """Compile the function for models of this type, if the cache lacks it: see compile_in_child()."""
    made = f"compiled_layers({dtype}, compiles_here=True)"
    compile_in_child(all_layers, f"import torch; from {__name__} import compiled_layers; {made}")


def compiled_layers(dtype: torch.dtype, *, compiles_here: bool = False) -> Any:
    """The function for models of this type. `compiles_here`: as of Kernels."""
    pointers = types.CPointer(KERNEL_TYPES[dtype]), types.CPointer(types.int64), types.CPointer(types.float32)
    arguments = (*pointers, types.intp, types.intp)
    began_s = time.monotonic()
    if not compiles_here:
        compile_layers(dtype)
    compiled = compiled_function(all_layers, arguments)
    _log.info("the function for all layers is ready", seconds=round(time.monotonic() - began_s, 1))
    return compiled


class CpuLayers:
    """All layers of a decoder. A row's result depends only on the row's own inputs, bit for bit; in a longer chunk also
    on the chunk, and on how many rows of the step are wanted."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: list[list[np.ndarray | None]],
        embedding: np.ndarray,
        final_norm: np.ndarray,
        head: np.ndarray | None,
        bounds: LogitBounds | None,
        pool: KvPool,
        attention: CpuAttention,
        turns: np.ndarray,
        threads: int,
        takes_both_cores: bool,
    ) -> None:
        """layers: for each layer, its arrays in the order of LAYERS. head: what PackedMatmul.memory() returns. bounds:
        of this head. The caller keeps the weights in memory."""
        dtype = pool.storage.dtype
        number = as_array(pool.keys).dtype
        weights = [embedding, final_norm, *([] if head is None else [head])]
        weights += [array for layer in layers for array in layer if array is not None]
        assert all(array.dtype == number and array.flags.c_contiguous for array in weights)
        assert turns.dtype == np.float32
        assert turns.flags.c_contiguous
        self._attention = attention
        self._function = compiled_layers(dtype)
        self._run = CompiledKernel(run_threads, (types.intp,) * 5, threads, least=0)
        self._run_alone = CompiledKernel(run_threads, (types.intp,) * 5, 1, least=0)
        self._read_bytes = sum(array.nbytes for array in weights if array is not embedding)
        self._token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * number.itemsize
        has_choice = takes_both_cores and self._run.threads == 2
        self._one_row = ThreadsOfOneRow(_MOST_BYTES_ALONE) if has_choice else None
        self._most_logits = 0 if head is None else MOST_TABLE_ROWS if head.ndim == 2 else MOST_HEAD_ROWS
        self._num_layers, self._vocab, self._hidden_size = config.num_layers, config.vocab_size, config.hidden_size
        assert len(embedding) == self._vocab
        addresses = [[0 if array is None else array.ctypes.data for array in layer] for layer in layers]

        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._scratch_widths = {
            at.STREAM: config.hidden_size,
            at.NORMED: config.hidden_size,
            at.PROJECTED: query_size + 2 * kv_size,
            at.MIXED: query_size,
            at.GATE_UP: 2 * config.intermediate_size,
            at.ACTIVATED: config.intermediate_size,
        }
        self._has_query_blocks = query_size % OUTPUTS == 0
        self._scratch: dict[int, Tensor] = {}
        self._scratch_rows = self._likeliest_rows = 0
        self._arrived = np.zeros(3, np.int64)
        self._taken = np.zeros(self._run.threads * COUNTER, np.int64)
        self._tried = np.zeros(self._run.threads, np.int64)
        fixed = {
            at.EMBEDDING: embedding,
            at.TURNS: turns,
            at.FINAL_NORM: final_norm,
            at.KEYS: as_array(pool.keys),
            at.VALUES: as_array(pool.values),
            at.WINDOWS: np.array(config.windows, np.int64),
            at.LAYERS: np.array(addresses, np.int64),
            at.ARRIVED: self._arrived,
            at.TAKEN: self._taken,
            at.TRIED: self._tried,
        }
        if head is not None:
            fixed[at.HEAD] = head
        self._bounds, self._calls_without_bounds = bounds, 0
        if bounds is not None:
            fixed |= {at.CODES: bounds.codes, at.SCALES: bounds.scales, at.ERRORS: bounds.errors}
            fixed[at.BLOCK_BOUNDS] = bounds.blocks
        self._numbers = np.array([config.rms_norm_eps, config.head_dim**-0.5], np.float32)
        self._arguments = np.zeros(at.NUM_ARGUMENTS, np.int64)
        for place, array in fixed.items():
            self._arguments[place] = array.ctypes.data
        sizes = {
            at.NUM_BLOCKS: pool.keys.shape[1],
            at.BLOCK_SIZE: pool.block_size,
            at.NUM_HEADS: config.num_heads,
            at.NUM_KV_HEADS: config.num_kv_heads,
            at.HEAD_DIM: config.head_dim,
            at.WIDTH: config.hidden_size,
            at.INNER: config.intermediate_size,
            at.VOCAB: len(embedding),
            at.NUM_POSITIONS: len(turns),
            at.HEAD_IS_TABLE: head is not None and head.ndim == 2,
        }
        for place, size in sizes.items():
            self._arguments[place] = size
        self._kept = layers, fixed  # the function has addresses alone
        self._addresses = self._function.address, self._arguments.ctypes.data, self._numbers.ctypes.data

    def leaves_core(self, num_rows: int) -> bool:
        """Whether the next step, of so many rows, leaves one of two cores to other threads. Its results do not depend
        on it, and at times it is decided otherwise when the step begins."""
        return num_rows == 1 and self._one_row is not None and self._one_row.took_one

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None = None,
        before_kernels: Callable[[], None] = nothing,
    ) -> Tensor | None:
        """Hidden states [wanted rows, hidden size] after all layers. None, and nothing is done, if no kernel computes
        the attention of a chunk. tokens, positions: int64 [rows], of the vocabulary and of the table of turns. wanted:
        int64, the rows of the result; None: all. before_kernels: called when nothing is left to do but to run the
        function."""
        return self._compute(tokens, positions, wanted, {}, before_kernels)

    def logits(self, tokens: Tensor, positions: Tensor, before_kernels: Callable[[], None] = nothing) -> Tensor | None:
        """As run(), but logits [rows, vocab]. None also if the kernels cannot read the head, or for many rows."""
        num_rows = tokens.shape[0]
        if num_rows > self._most_logits:
            return None
        logits = torch.empty(num_rows, self._vocab, dtype=self._attention.dtype)
        hidden = self._compute(tokens, positions, None, {at.LOGITS: logits}, before_kernels)
        return None if hidden is None else logits

    def head(self, hidden: Tensor) -> Tensor | None:
        """Logits [rows, vocab] of hidden states from run(): of a row the same bits as from logits(). None if that would
        be None, too."""
        if not 0 < len(hidden) <= self._most_logits:
            return None
        logits = torch.empty(len(hidden), self._vocab, dtype=self._attention.dtype)
        self._compute_head(hidden, {at.LOGITS: logits})
        return logits

    def likeliest(
        self, tokens: Tensor, positions: Tensor, before_kernels: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor] | None:
        """As logits(), but what largest_logits() returns for them. None also if there is no copy of the head, or if it
        is of no use now."""
        results = self._new_likeliest(tokens.shape[0])
        if results is None or self._compute(tokens, positions, None, results, before_kernels) is None:
            return None
        return self._likeliest(results)

    def likeliest_of(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """As head(), but what largest_logits() returns for the logits. None as from likeliest()."""
        if (results := self._new_likeliest(len(hidden))) is None:
            return None
        self._compute_head(hidden, results)
        return self._likeliest(results)

    def _new_likeliest(self, num_rows: int) -> dict[int, Tensor] | None:
        """Room for the results, if bounds are of use."""
        if self._bounds is None or not num_rows:
            return None
        if self._calls_without_bounds:
            self._calls_without_bounds -= 1
            return None
        if num_rows > self._likeliest_rows:
            scratch = {
                at.UPPER_BOUNDS: torch.empty(num_rows, len(self._bounds.blocks)),
                at.FOUND: torch.empty(2, self._run.threads, num_rows, 2, dtype=torch.int32),
                at.THRESHOLDS: torch.empty(num_rows),
            }
            for place, tensor in scratch.items():
                self._scratch[place] = tensor
                self._arguments[place] = tensor.data_ptr()
            self._likeliest_rows = num_rows
        tokens, failed = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        return {at.LIKELIEST: tokens, at.FAILED: failed}

    def _likeliest(self, results: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        assert self._bounds is not None
        tokens, failed = results[at.LIKELIEST], results[at.FAILED]
        if int(self._tried.sum()) * _FEW_BLOCKS > len(tokens) * len(self._bounds.blocks):
            self._calls_without_bounds = _CALLS_WITHOUT
        return tokens, failed

    def _compute_head(self, hidden: Tensor, results: dict[int, Tensor]) -> None:
        assert hidden.is_contiguous()
        assert hidden.dtype == self._attention.dtype
        self._arguments[at.NUM_LAYERS] = 0
        self._call(len(hidden), hidden, results, has_all_rows=True, alone=False)

    def _compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None,
        results: dict[int, Tensor],
        before_kernels: Callable[[], None],
    ) -> Tensor | None:
        """Hidden states, as from run(). results: tensors for other results, by their places in the arguments."""
        num_rows = tokens.shape[0]  # len() of a tensor takes several calls of Python
        if (planned := self._attention.planned_rows(num_rows)) is None:
            if self._one_row is not None:
                self._one_row.begin_other()
            return None
        num_chunks = len(planned.chunks)
        indices = {at.TOKENS: tokens, at.POSITIONS: positions, at.SLOTS: self._attention.slot_mapping}
        arrays = {
            at.BLOCK_IDS: planned.block_ids,
            at.FIRST_BLOCKS: planned.first_blocks,
            at.KV_LENS: planned.kv_lens,
            at.ROWS: planned.rows,
        }
        if num_chunks:
            arrays[at.CHUNKS] = planned.chunks
            self._arguments[at.PACKED_KEYS] = planned.packed_keys.ctypes.data
            self._arguments[at.SEEN_VALUES] = planned.seen_values.ctypes.data
        if wanted is not None:
            assert wanted.shape[0] <= num_rows
            indices[at.WANTED] = wanted
        skips_queries = wanted is not None and self._can_skip_queries(wanted.shape[0], num_rows, planned)
        if skips_queries:
            assert wanted is not None
            _, *tables = self._attention.tables_of(wanted.numpy())
            arrays |= zip((at.WANTED_FIRST_BLOCKS, at.WANTED_KV_LENS, at.WANTED_ROWS), tables, strict=True)
        for place, tensor in indices.items():
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
            self._arguments[place] = tensor.data_ptr()
        for place, array in arrays.items():
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
            self._arguments[place] = array.ctypes.data
        self._arguments[at.NUM_BLOCK_IDS] = len(planned.block_ids)
        self._arguments[at.NUM_ATTENDING], self._arguments[at.NUM_CHUNKS] = len(planned.rows), num_chunks
        self._arguments[at.NUM_SCRATCH] = len(planned.seen_values)
        self._arguments[at.NUM_LAYERS], self._arguments[at.SKIPS_QUERIES] = self._num_layers, skips_queries
        count = num_rows if wanted is None else wanted.shape[0]
        hidden = torch.empty(count, self._hidden_size, dtype=self._attention.dtype)
        alone = self._takes_one_thread(num_rows, planned)
        self._call(num_rows, hidden, results, wanted is None, alone, before_kernels)
        return hidden

    def _takes_one_thread(self, num_rows: int, planned: PlannedRows) -> bool:
        if self._one_row is None:
            return False
        if num_rows > 1:
            self._one_row.begin_other()
            return False
        return self._one_row.begin(self._read_bytes + self._token_bytes * int(planned.kv_lens[0]), time.monotonic())

    def _can_skip_queries(self, num_wanted: int, num_rows: int, planned: PlannedRows) -> bool:
        of_chunks = num_wanted - len(planned.rows)  # at least; most of the other rows are decodes, which are wanted
        is_few = num_wanted * _FEW_WANTED <= num_rows and of_chunks <= _FEW_OF_CHUNK * len(planned.chunks)
        return is_few and self._has_query_blocks

    def _call(
        self,
        num_rows: int,
        hidden: Tensor,
        results: dict[int, Tensor],
        has_all_rows: bool,
        alone: bool,
        before_kernels: Callable[[], None] = nothing,
    ) -> None:
        if num_rows > self._scratch_rows:
            for place, width in self._scratch_widths.items():
                self._scratch[place] = torch.empty(num_rows, width, dtype=self._attention.dtype)
                self._arguments[place] = self._scratch[place].data_ptr()
            self._scratch_rows = num_rows
        self._arguments[at.STREAM] = (hidden if has_all_rows else self._scratch[at.STREAM]).data_ptr()
        self._arguments[at.HIDDEN] = hidden.data_ptr()
        for place in (at.LOGITS, at.LIKELIEST, at.FAILED):
            self._arguments[place] = results[place].data_ptr() if place in results else 0
        self._arguments[at.NUM_ROWS], self._arguments[at.NUM_WANTED] = num_rows, hidden.shape[0]
        self._arrived[:] = 0
        self._taken[:] = 0
        self._tried[:] = 0
        function, arguments, numbers = self._addresses
        like = arguments  # for its type; nothing reads this pointer
        run = self._run_alone if alone else self._run
        before_kernels()
        run(function, like, arguments, numbers, run.threads)
        if self._arrived[1]:
            raise RuntimeError("the threads of a step do not run at the same time: check the OMP_ variables")
        if self._arrived[2] < run.threads:  # numba has logged why
            raise RuntimeError("a thread of a step has failed")


def cpu_layers(
    config: DecoderConfig,
    weights: DecoderWeights,
    pool: KvPool,
    attention: CpuAttention,
    ops: CpuOps,
    matmul: PackedMatmul,
    threads: int,
    takes_both_cores: bool,
    with_bounds: bool,
) -> CpuLayers | None:
    """None if the function cannot compute this model. `matmul`: with kernels for a few rows. `takes_both_cores`:
    the machine has two cores, and the worker's threads take both. `with_bounds`: make a copy of the head, with
    which the largest logit takes less time. The CPU must have has_byte_products()."""
    if config.output_bias:
        return None
    layers = [_arrays_of(layer, ops, matmul) for layer in weights.layers]
    needed = at.QKV, at.OUTPUT, at.GATE_UP_MATRIX, at.DOWN
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
    arrays = [array for array in chain(tables, *layers) if array is not None]
    bounds = None
    if head_memory is not None and with_bounds:
        bounds = logit_bounds(head_memory, config.vocab_size, config.hidden_size)
        arrays.append(bounds.codes)
    use_huge_pages(arrays)
    return CpuLayers(config, layers, *tables, bounds, pool, attention, ops.turns, threads, takes_both_cores)


def _arrays_of(layer: LayerWeights, ops: CpuOps, matmul: PackedMatmul) -> list[np.ndarray | None]:
    arrays: list[np.ndarray | None] = [None] * at.NUM_LAYER_ARRAYS
    matrices = {at.QKV: layer.qkv, at.OUTPUT: layer.output, at.GATE_UP_MATRIX: layer.gate_up, at.DOWN: layer.down}
    for place, matrix in matrices.items():
        if isinstance(matrix, Tensor) and matrix.is_mkldnn:
            arrays[place] = matmul.memory(matrix, layer.input_norm.dtype)
    arrays[at.INPUT_NORM], arrays[at.MLP_NORM] = as_array(layer.input_norm), as_array(layer.mlp_norm)
    if layer.qkv_bias is not None:
        arrays[at.QKV_BIAS] = as_array(layer.qkv_bias)
    if layer.query_norm is not None and layer.key_norm is not None:
        arrays[at.HEAD_NORMS] = ops.norms_of(layer.query_norm, layer.key_norm)
    return arrays
