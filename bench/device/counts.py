"""What sampling asks of a GPU, counted without one: operations, and bytes that they read and write.

Torch's operations are counted by their tensors, on torch's `meta` device. The kernels of fused_kernels.py are run by
Triton's interpreter, and their loads from the logits are counted; all else that they read is small. Needs the
environment variable TRITON_INTERPRET=1 from the start of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.sampling import fused
from gpu_worker.sampling.sampler import SamplingRows, sample

# The rows of Llama-3.1-8B in bench.gpu. The spread is that of a model's logits: the most likely 100 tokens have most of
# the probability.
ROWS, VOCAB, SPREAD = 128, 128_256, 3.0
TOP_LOGPROBS = 5

CASES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.5": {"top_p": 0.5},
    "top-p 0.1, temperature 2": {"top_p": 0.1, "temperature": 2.0},
    "top-p 0.3, temperature 10": {"top_p": 0.3, "temperature": 10.0},
    "top-k and top-p": {"top_k": 50, "top_p": 0.95},
    "top-k 5,000": {"top_k": 5_000},
    "top-k 5,000, top-p 0.95": {"top_k": 5_000, "top_p": 0.95},
    "top-k 5,000, top-p 0.5": {"top_k": 5_000, "top_p": 0.5},
    "min-p": {"min_p": 0.05},
    "log probabilities": {"temperature": 0.0, "scored": True},
}


@dataclass(slots=True)
class Counted:
    """The counts of one call of sample()."""

    operations: int = 0
    bytes: int = 0
    passes: list[float] = field(default_factory=list)  # for each row, how often fused.py's kernels read its logits


def make_rows(rows: int, temperature: float = 1.0, scored: bool = False, **filters: float) -> SamplingRows:
    columns = {"temperature": temperature, "min_p": 0.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0} | filters
    nothing = np.zeros(0, np.int64)
    return SamplingRows(
        columns={n: np.full(rows, value, np.int64 if n == "top_k" else np.float32) for n, value in columns.items()},
        seed=np.arange(rows, dtype=np.uint64),
        position=np.zeros(rows, np.int64),
        banned_rows=nothing,
        banned_tokens=nothing,
        scored=np.arange(rows) if scored else nothing,
        num_top=np.full(rows if scored else 0, TOP_LOGPROBS),
    )


def count_torch(case: Mapping[str, Any], rows: int, vocab: int) -> Counted:
    """Sampling with torch's own kernels."""
    counter = _Counter()
    with counter:
        sample(torch.zeros(rows, vocab, dtype=torch.bfloat16, device="meta"), make_rows(rows, **case))
    return counter.counted


def count_fused(case: Mapping[str, Any], rows: int, vocab: int) -> Counted:
    """Sampling with the kernels of fused_kernels.py, on random logits."""
    generator = torch.Generator().manual_seed(1)
    logits = (SPREAD * torch.randn(rows, vocab, generator=generator)).to(torch.bfloat16)
    counter = _Counter()
    with counter, _count_loads(logits) as loads:
        sample(logits, make_rows(rows, **case), fused=True)
    counter.counted.passes = (loads / vocab).tolist()
    counter.counted.bytes += int(loads.sum()) * logits.element_size()
    return counter.counted


_TRITON: dict[str, Callable[..., object]] = {
    "paceline::sample_rows": fused.sample_rows_by_triton,
    "paceline::score_rows": fused.score_rows_by_triton,
}


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the bytes of their arguments and results. Views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = Counted()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kernel := _TRITON.get(func._schema.name):
            self.counted.operations += 1
            return kernel(*args)
        result = func(*args, **(kwargs or {}))
        if not any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            self.counted.operations += 1
            results = result if isinstance(result, tuple | list) else [result]
            values = [*args, *(kwargs or {}).values(), *results]
            self.counted.bytes += sum(value.nbytes for value in values if isinstance(value, Tensor))
        return result


@contextmanager
def _count_loads(logits: Tensor) -> Iterator[npt.NDArray[np.int64]]:
    """Count how many logits of each row the interpreter loads."""
    from triton.runtime.interpreter import InterpreterBuilder

    loads = np.zeros(len(logits), np.int64)
    row_bytes = logits.shape[1] * logits.element_size()
    load = InterpreterBuilder.create_masked_load

    def count(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        rows = (pointers.data[mask.data].astype(np.int64) - logits.data_ptr()) // row_bytes
        np.add.at(loads, rows[(rows >= 0) & (rows < len(loads))], 1)
        return load(builder, pointers, mask, *rest)

    InterpreterBuilder.create_masked_load = count
    try:
        yield loads
    finally:
        InterpreterBuilder.create_masked_load = load
