"""What a decoder layer computes row by row, apart from products and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from gpu_worker.cpu.numbers import FASTMATH, exp, load, store


def norm(x: Any, weight: Any, eps: float, out: Any) -> None:
    width = x.shape[1]
    for row in prange(len(x)):
        squares = np.float32(0)
        for d in range(width):
            squares += load(x[row, d]) * load(x[row, d])
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for d in range(width):
            store(out, (row, d), load(x[row, d]) * factor * load(weight[d]))


def rotate(heads: Any, num_heads: int, angles: Any, has_norms: bool, norms: Any, num_queries: int, eps: float) -> None:
    head_dim = heads.shape[2]
    for row in prange(len(heads)):
        for h in range(num_heads):
            head = heads[row, h]
            factor = np.float32(1)
            if has_norms:
                squares = np.float32(0)
                for d in range(head_dim):
                    squares += load(head[d]) * load(head[d])
                factor = np.float32(1) / np.sqrt(squares / np.float32(head_dim) + eps)
            turns = angles[row]
            # Two loops, because the compiler does not vectorize a loop that contains the condition.
            if has_norms:
                norm = norms[0 if h < num_queries else 1]
                for pair in range(head_dim // 2):
                    real, imaginary = load(head[2 * pair]), load(head[2 * pair + 1])
                    real *= factor * load(norm[2 * pair])
                    imaginary *= factor * load(norm[2 * pair + 1])
                    _turn(head, pair, real, imaginary, turns)
            else:
                for pair in range(head_dim // 2):
                    real, imaginary = load(head[2 * pair]), load(head[2 * pair + 1])
                    _turn(head, pair, real, imaginary, turns)


@njit(inline="always", fastmath=FASTMATH)
def _turn(head: Any, pair: Any, real: Any, imaginary: Any, turns: Any) -> None:
    cos, sin = turns[2 * pair], turns[2 * pair + 1]
    store(head, 2 * pair, real * cos - imaginary * sin)
    store(head, 2 * pair + 1, real * sin + imaginary * cos)


def write(key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    block_size, kv_heads, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    for row in prange(len(slots)):
        block, token = slots[row] // block_size, slots[row] % block_size
        for k in range(kv_heads):
            for d in range(head_dim):
                keys[block, token, k, d] = key[row, k, d]
                values[block, token, k, d] = value[row, k, d]


def silu_and_mul(gate_up: Any, out: Any) -> None:
    width = out.shape[1]
    for row in prange(len(out)):
        for d in range(width):
            store(out, (row, d), gated(load(gate_up[row, d]), load(gate_up[row, width + d])))


@njit(inline="always", fastmath=FASTMATH)
def gated(gate: Any, up: Any) -> Any:
    """silu(gate) * up"""
    return gate / (np.float32(1) + exp(-gate)) * up
