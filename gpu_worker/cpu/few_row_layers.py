"""Calls the function that computes all layers of a step with a few rows (all_layers.py)."""

from __future__ import annotations

import numpy as np
import torch
from numba import threading_layer, types
from torch import Tensor

from gpu_worker.cpu import all_layers as at
from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.compiling import CompiledKernel, compiled_function
from gpu_worker.cpu.matmul import PackedMatmul
from gpu_worker.cpu.numbers import KERNEL_TYPES, as_array
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.cpu.wide_attention import WIDTH
from gpu_worker.kv.pool import KvPool
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.weights import DecoderWeights, LayerWeights

# With up to so many rows, all layers in one call are faster, on two Zen 4 cores.
MOST_ROWS = 32


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
        """layers: for each layer, its arrays in the order of all_layers.py."""
        dtype = pool.storage.dtype
        self._attention = attention
        pointers = types.CPointer(KERNEL_TYPES[dtype]), types.CPointer(types.int64), types.CPointer(types.float32)
        function = at.wide_layers if config.head_dim % WIDTH == 0 else at.narrow_layers
        self._function = compiled_function(function, (*pointers, types.intp, types.intp))
        self._run = CompiledKernel(at.run_threads, (types.intp,) * 5, threads, least=0)
        addresses = [[0 if array is None else array.ctypes.data for array in layer] for layer in layers]

        def scratch(width: int) -> np.ndarray:
            return as_array(torch.empty(MOST_ROWS, width, dtype=dtype))

        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._arrived = np.zeros(2, np.int64)
        fixed = {
            at.KEYS: as_array(pool.keys),
            at.VALUES: as_array(pool.values),
            at.WINDOWS: np.array(config.windows, np.int64),
            at.LAYERS: np.array(addresses, np.int64),
            at.PROJECTED: scratch(query_size + 2 * kv_size),
            at.MIXED: scratch(query_size),
            at.GATE_UP: scratch(2 * config.intermediate_size),
            at.ACTIVATED: scratch(config.intermediate_size),
            at.ARRIVED: self._arrived,
        }
        self._numbers = np.array([config.rms_norm_eps, config.head_dim**-0.5], np.float32)
        self._arguments = np.zeros(at.NUM_ARGUMENTS, np.int64)
        for place, array in fixed.items():
            self._arguments[place] = array.ctypes.data
        sizes = {
            at.NUM_LAYERS: config.num_layers,
            at.NUM_BLOCKS: pool.keys.shape[1],
            at.BLOCK_SIZE: pool.block_size,
            at.NUM_HEADS: config.num_heads,
            at.NUM_KV_HEADS: config.num_kv_heads,
            at.HEAD_DIM: config.head_dim,
            at.WIDTH: config.hidden_size,
            at.INNER: config.intermediate_size,
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
        for place, array in enumerate(arrays, at.ANGLES):
            assert array.flags.c_contiguous
            self._arguments[place] = array.ctypes.data
        self._arguments[at.HIDDEN] = hidden.data_ptr()
        self._arguments[at.NUM_ROWS], self._arguments[at.NUM_BLOCK_IDS] = num_rows, len(tables[0])
        self._arrived[:] = 0
        function, arguments, numbers = self._addresses
        like = arguments  # for its type; nothing reads this pointer
        self._run(function, like, arguments, numbers, self._run.threads)
        if self._arrived[1]:
            raise RuntimeError("the threads of a step do not run at the same time: check the OMP_ variables")
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
    needed = at.QKV, at.OUTPUT, at.GATE_UP_MATRIX, at.DOWN
    if any(layer[place] is None for layer in layers for place in needed):
        return None
    if threads > 1 and threading_layer() == "tbb":  # it may run the threads one after another
        return None
    return FewRowLayers(config, layers, pool, attention, threads)


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
