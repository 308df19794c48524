"""Sampling in a few passes over the logits, as two operations of torch: their CUDA kernels are in fused_kernels.py.

On a CPU, the operations compute the same with torch's own kernels: the reference that the CUDA kernels are tested
with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.sampling.filters import FILTERS, Column, scale_of_weights
from gpu_worker.sampling.torch_sampling import draw_filtered, score

# Warps of a program, of 32 threads each: 8 values of a tile per thread.
NUM_WARPS = 16
# temperature, min_p, top_p (float32), top_k, two words of draw_keys() (int32)
NUM_PARAMETERS = 6
# Filters that the kernels lack: their rows are sampled with torch's filters.
OTHER_FILTERS = tuple(name for name in FILTERS if name not in ("min_p", "top_k", "top_p"))
ANY_VOCAB = 2**31 - 1  # the size that Filter.needs gets: none of the other filters depends on it

_LIBRARY = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("sample_rows(Tensor logits, Tensor parameters) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
_LIBRARY.define("score_rows(Tensor logits, Tensor rows, Tensor tokens, int num_top) -> (Tensor, Tensor, Tensor)")  # type: ignore[no-untyped-call]


def parameters_of(columns: Mapping[str, Column], keys: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """What sample_rows() gets: int32 [rows, NUM_PARAMETERS]."""
    made = np.empty((len(keys), NUM_PARAMETERS), np.int32)
    floats = made.view(np.float32)
    floats[:, 0], floats[:, 1], floats[:, 2] = columns["temperature"], columns["min_p"], columns["top_p"]
    made[:, 3], made[:, 4:] = columns["top_k"], keys
    return made


def need_other_filters(columns: Mapping[str, Column]) -> npt.NDArray[np.bool_]:
    """Which rows sample_rows() cannot sample, bool [rows]."""
    random, needs = columns["temperature"] > 0, np.zeros(len(columns["temperature"]), bool)
    for name in OTHER_FILTERS:
        needs |= FILTERS[name].needs(columns[name], ANY_VOCAB)
    return random & needs


def sample_rows(logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens, int64 [rows], and which rows have none, bool [rows]: those with a NaN or without a finite maximum;
    their token is 0. Not for rows that need_other_filters().

    logits: [rows, vocab], any float type; not changed. parameters: parameters_of(), on the device."""
    made: tuple[Tensor, Tensor] = torch.ops.paceline.sample_rows(logits, parameters)
    return made


def score_rows(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """score() in torch_sampling.py, of these rows. logits: [all rows, vocab], any float type. rows: int64 [rows].
    tokens: int64 [rows]."""
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.paceline.score_rows(logits, rows, tokens, num_top)
    return made


@torch.library.impl(_LIBRARY, "sample_rows", "CPU")
def _sample_rows_by_torch(logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    words = parameters.numpy()
    floats = words.view(np.float32)
    best, tokens = logits.max(dim=-1)
    failed = ~best.isfinite()
    random = np.flatnonzero((floats[:, 0] > 0) & ~failed.numpy())
    if len(random):
        columns = {"temperature": floats[:, 0], "min_p": floats[:, 1], "top_p": floats[:, 2], "top_k": words[:, 3]}
        chosen = {name: column[random] for name, column in columns.items()}
        drawn = draw_filtered(logits[random].float(), chosen, words[random, 4:])
        tokens.index_copy_(0, torch.from_numpy(random), drawn)
    return tokens.masked_fill_(failed, 0), failed


@torch.library.impl(_LIBRARY, "score_rows", "CPU")
def _score_rows_by_torch(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    return score(logits.index_select(0, rows).float().log_softmax(-1), tokens, num_top)


@torch.library.impl(_LIBRARY, "sample_rows", "CUDA")
def sample_rows_by_triton(logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    # Here, because only a worker on a GPU has triton.
    from gpu_worker.sampling import fused_kernels

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    scratch = logits.new_empty(rows, 7 * fused_kernels.MAX_CANDIDATES // 4, dtype=torch.int64)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    failed = logits.new_empty(rows, dtype=torch.bool)
    fused_kernels.sample_rows[(rows,)](
        logits, logits.stride(0), parameters, scratch, tokens, failed, vocab,
        scale_of_weights(vocab), TILE=fused_kernels.TILE, CAPACITY=fused_kernels.MAX_CANDIDATES, num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens, failed


@torch.library.impl(_LIBRARY, "score_rows", "CUDA")
def score_rows_by_triton(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    from gpu_worker.sampling import fused_kernels

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    vocab = logits.shape[1]
    num_top = min(num_top, vocab)
    scratch = logits.new_empty(len(rows), fused_kernels.MAX_CANDIDATES, dtype=torch.int64)
    sampled = logits.new_empty(len(rows), dtype=torch.float32)
    top_ids = logits.new_empty(len(rows), num_top, dtype=torch.int64)
    top = logits.new_empty(len(rows), num_top, dtype=torch.float32)
    fused_kernels.score_rows[(len(rows),)](
        logits, logits.stride(0), rows, tokens, scratch, sampled, top_ids, top, vocab, num_top,
        TILE=fused_kernels.TILE, CAPACITY=fused_kernels.MAX_CANDIDATES, num_warps=NUM_WARPS,
    )  # fmt: skip
    return sampled, top_ids, top


def try_kernels(vocab: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compile the kernels, which takes some seconds the first time, and compare their results with those of a CPU.
    Returns why they cannot be used; None: they can.

    dtype: of the model's logits. The kernels also get float32 logits, after logits processors."""
    rows = len(_TRIAL["temperature"])
    keys = np.arange(2 * rows, dtype=np.int32).reshape(rows, 2)
    parameters = torch.from_numpy(parameters_of(_TRIAL, keys))
    noise = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    which, num_top = torch.arange(rows), min(5, vocab)
    try:
        for kind in {dtype, torch.float32}:
            logits = (3 * noise).to(kind)
            tokens, _ = sample_rows(logits, parameters)
            drawn, failed = sample_rows(logits.to(device), parameters.to(device))
            # Rounding may let another token win where two clocks (gumbel.py) ring almost together.
            if failed.any() or int((drawn.cpu() != tokens).sum()) > 1:
                return "they draw other tokens than a CPU"
            expected = score_rows(logits, which, tokens, num_top)
            found = score_rows(logits.to(device), which.to(device), tokens.to(device), num_top)
            sampled, ids, top = (result.cpu() for result in found)
            close = torch.allclose(sampled, expected[0], atol=1e-4) and torch.allclose(top, expected[2], atol=1e-4)
            if not close or not torch.equal(ids, expected[1]):
                return "they find other log probabilities than a CPU"
    except Exception as error:  # no Triton, no C compiler, or whatever Triton's compiler raises
        return f"{type(error).__name__}: {error}"
    return None


# Rows that take the usual ways through the kernels.
_TRIAL: Mapping[str, Column] = {
    "temperature": np.array([0, 1, 0.7, 1, 1.5, 1, 1, 1], np.float32),
    "min_p": np.array([0, 0, 0.05, 0, 0, 0, 0, 0], np.float32),
    "top_p": np.array([1, 1, 1, 0.95, 0.2, 0.9, 1, 0.9], np.float32),
    "top_k": np.array([0, 0, 0, 0, 0, 50, 20, 5_000]),
}


@torch.library.register_fake("paceline::sample_rows")  # type: ignore[untyped-decorator]
def _shapes_of_sample_rows(logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.bool)


@torch.library.register_fake("paceline::score_rows")  # type: ignore[untyped-decorator]
def _shapes_of_score_rows(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(rows), min(num_top, logits.shape[1])
    return (
        logits.new_empty(len(rows), dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.float32),
    )
