"""Kernels that the tests of a process share."""

from __future__ import annotations

from functools import cache

import torch

from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.products import FewRows


@cache
def ready_kernels(dtype: torch.dtype, threads: int, wide_heads: bool = False, by_size: bool = True) -> Kernels:
    return Kernels(dtype, threads, wide_heads=wide_heads, by_size=by_size)


@cache
def ready_few_rows(dtype: torch.dtype, threads: int) -> FewRows:
    return FewRows(dtype, threads)
