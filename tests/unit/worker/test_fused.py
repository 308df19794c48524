"""The sampling kernels for GPUs, run by Triton's interpreter, against torch's own kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.device import counts
from gpu_worker.sampling import fused
from gpu_worker.sampling.fused import (
    parameters_of,
    sample_rows,
    sample_rows_by_triton,
    score_rows,
    score_rows_by_triton,
    try_kernels,
)
from gpu_worker.sampling.gumbel import draw_keys

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("with a GPU's driver, tests/gpu runs these kernels instead of the interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")
from gpu_worker.sampling import fused_kernels

DTYPES = [torch.float32, torch.bfloat16]
# More than one tile, and no multiple of it.
VOCAB = 1_001


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter needs more time for wider tiles."""
    monkeypatch.setattr(fused_kernels, "TILE", 128)
    monkeypatch.setattr(fused_kernels, "MAX_CANDIDATES", 256)


def make_parameters(count: int, *, seed: int = 0, **columns: Any) -> Tensor:
    defaults = {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": 0}
    filled = {name: np.broadcast_to(np.asarray(columns.get(name, value)), count) for name, value in defaults.items()}
    keys = draw_keys(np.arange(count, dtype=np.uint64), np.full(count, seed))
    return torch.from_numpy(parameters_of(filled, keys))


def make_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> Tensor:
    return (spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def both(logits: Tensor, parameters: Tensor) -> tuple[list[int], list[int]]:
    """The tokens by torch and by the kernel; both fail the same rows."""
    tokens, failed = sample_rows(logits, parameters)
    fused_tokens, fused_failed = sample_rows_by_triton(logits, parameters)
    assert fused_failed.tolist() == failed.tolist()
    return tokens.tolist(), fused_tokens.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 100, VOCAB])
@pytest.mark.parametrize("seed", range(2))
def test_kernels_draw_the_tokens_that_torch_draws(dtype: torch.dtype, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 16
    parameters = make_parameters(
        count,
        seed=seed,
        temperature=rng.choice([0, 0.3, 1, 1.7], count),
        min_p=rng.choice([0, 0, 0.05, 1], count),
        top_p=rng.choice([1, 0.9, 0.5, 0.05, 0], count),
        top_k=rng.choice([0, 1, 20, 300, VOCAB], count),
    )
    expected, drawn = both(make_logits(count, vocab, dtype, seed), parameters)
    assert drawn == expected


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.8}, {"top_k": 40}, {"top_k": 40, "top_p": 0.8}, {"top_k": 400, "top_p": 0.5}]
)
def test_equal_logits_are_all_kept(filters: dict[str, Any]) -> None:
    """More equals than a row has candidates, around the threshold of each filter."""
    logits = torch.zeros(4, VOCAB)
    logits[:, ::3] = -1.0
    logits[:, 5] = 2.0
    expected, drawn = both(logits, make_parameters(4, **filters))
    assert drawn == expected
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(
    "filters", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.6}, {"top_k": 4, "min_p": 0.6}]
)
def test_every_token_that_a_filter_keeps_is_drawn_and_no_other(filters: dict[str, Any]) -> None:
    """Eight likely tokens, in pairs of equals, which are all in one lane of the tiles."""
    logits = (-20.0 - torch.arange(VOCAB) % 128).unsqueeze(0)
    logits[0, ::128] = make_logits(1, 4, torch.float32, spread=0.5).repeat(1, 2)
    expected, drawn = both(logits.expand(20, -1), make_parameters(20, **filters))
    assert drawn == expected
    assert 1 < len(set(drawn)) < 8


def test_top_p_keeps_no_token_more_when_the_sum_equals_it() -> None:
    """The weights of the first three tokens are 2, 1, 1."""
    logits = torch.full((20, VOCAB), -100.0)
    logits[:, 0], logits[:, 1:3] = 0.0, -math.log(2)
    expected, drawn = both(logits, make_parameters(20, top_p=0.5))
    assert drawn == expected == [0] * 20


def test_top_p_takes_its_share_of_what_top_k_keeps() -> None:
    """With almost equal logits, top-k keeps a third of the probability, and more tokens than a row has candidates."""
    logits = make_logits(1, VOCAB, torch.float32, spread=0.1)
    expected, drawn = both(logits.expand(12, -1), make_parameters(12, top_k=300, top_p=0.3))
    assert drawn == expected


SHAPES = {
    "normal": lambda rng, size: rng.normal(0, 3, size),
    "peaked": lambda rng, size: rng.standard_t(2, size) * 2,
    "flat": lambda rng, size: rng.uniform(-1, 1, size),
    "few values": lambda rng, size: rng.choice([0.0, 0.5, 0.75, 3.0], size),
    "mostly impossible": lambda rng, size: np.where(rng.random(size) < 0.7, -np.inf, rng.normal(0, 3, size)),
    "one far below": lambda rng, size: np.where(np.arange(size) == 5, -1e4, rng.normal(0, 0.3, size)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_among_many_tokens_keep_the_tokens_that_torch_keeps(shape: str, dtype: torch.dtype) -> None:
    """Every top_k except 0 is above 96 (3/4 of a tile), so the kernel finds the limits with histograms. Top-p ends
    anywhere among the kept tokens."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(SHAPES[shape](rng, VOCAB)).to(dtype)
    count = 24
    parameters = make_parameters(
        count,
        seed=5,
        temperature=rng.choice([0.3, 1, 10], count),
        min_p=rng.choice([0, 0, 0.001], count),
        top_p=rng.choice([1, 0.999, 0.9, 0.6, 0.2], count),
        top_k=rng.choice([0, 97, 200, 300, 600, 1_000], count),
    )
    expected, drawn = both(logits.expand(count, -1), parameters)
    assert drawn == expected


def test_top_p_takes_its_share_also_of_the_last_tokens_that_top_k_keeps() -> None:
    """Of what top-k keeps, 40 tokens have a weight of 1, and 100 of the next 150 have a weight of about 1 / e."""
    logits = torch.full((40, VOCAB), -40.0)
    logits[:, :40], logits[:, 40:190] = 0.0, -1 - torch.arange(150) * 1e-5
    expected, drawn = both(logits, make_parameters(40, top_k=140, top_p=0.9))
    assert drawn == expected
    assert max(drawn) >= 40


def test_top_p_does_not_trust_a_wrong_estimate() -> None:
    """All 400 tokens are almost equally likely, but a border between two bins is in their middle. The estimate takes a
    bin's middle, so it overestimates the tokens above the border and underestimates those below it. So top-p seems to
    end among the first 200, and the scratch memory has no room for the 200 tokens below."""
    logits = torch.full((40, VOCAB), -40.0)
    logits[:, 0], logits[:, 1:201], logits[:, 201:401] = 0.0, -0.119, -0.123
    with counts._count_loads(logits) as loads:
        expected, drawn = both(logits, make_parameters(40, top_p=0.515))
    assert drawn == expected
    assert max(drawn) > 200
    assert loads.max() == 3 * VOCAB  # the third pass sums the weights of cells, and draws among equal logits


def test_the_earliest_clock_is_not_rounded_to_zero() -> None:
    """Token 743 has the smallest random number of the row, so small that 1 - x would round to 1. A time of 0 would make
    the token win, although its logit is much too low to be drawn."""
    logits = torch.zeros(157, VOCAB)
    logits[:, 743] = -60.0
    parameters = make_parameters(157, seed=158)[156:]
    expected, drawn = both(logits[156:], parameters)
    assert drawn == expected != [743]
    logits[:, 743] = 0.0
    assert both(logits[156:], parameters) == ([743], [743])


def test_tokens_without_probability_are_never_drawn() -> None:
    """A grammar leaves fewer tokens than top_k asks for."""
    logits = torch.full((8, VOCAB), -torch.inf)
    logits[:, [17, 800]] = 1.0
    for filters in ({}, {"top_k": 9}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.5}):
        expected, drawn = both(logits, make_parameters(8, **filters))
        assert drawn == expected
        assert set(drawn) == {17, 800}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_fail_alone(temperature: float) -> None:
    logits = make_logits(5, VOCAB, torch.float32)
    logits[1, 7] = torch.nan
    logits[2, 999] = torch.inf
    logits[3] = -torch.inf
    _, failed = sample_rows_by_triton(logits, make_parameters(5, temperature=temperature))
    assert failed.tolist() == [False, True, True, True, False]
    expected, drawn = both(logits, make_parameters(5, temperature=temperature))
    assert drawn == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_token_alone(dtype: torch.dtype) -> None:
    logits = make_logits(6, VOCAB, dtype)
    parameters = make_parameters(6, top_p=0.9, top_k=[0, 5, 0, 90, 0, 5], temperature=[0, 1, 1, 1, 0.2, 2])
    together, _ = sample_rows_by_triton(logits, parameters)
    for row in range(6):
        alone, _ = sample_rows_by_triton(logits[row : row + 1], parameters[row : row + 1])
        assert alone.tolist() == together[row : row + 1].tolist()


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_score_as_torch_does(dtype: torch.dtype, num_top: int) -> None:
    logits = make_logits(6, VOCAB, dtype)
    logits[2, 100:500] = logits[2].max()  # more equals than candidates
    logits[5, 2:] = -torch.inf  # fewer tokens than num_top
    rows, tokens = torch.tensor([0, 2, 5]), torch.tensor([3, 800, 1])
    sampled, ids, top = score_rows(logits, rows, tokens, num_top)
    fused_sampled, fused_ids, fused_top = score_rows_by_triton(logits, rows, tokens, num_top)
    torch.testing.assert_close(fused_sampled, sampled, atol=1e-5, rtol=1e-6)
    assert fused_ids.tolist() == ids.tolist()
    torch.testing.assert_close(fused_top, top, atol=1e-5, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered")  # by numpy, in the interpreter
def test_a_row_with_nan_has_scores_of_nan_and_tokens_of_the_vocabulary() -> None:
    logits = make_logits(3, VOCAB, torch.float32)
    logits[1, 50] = torch.nan
    logits[2] = torch.nan
    sampled, ids, top = score_rows_by_triton(logits, torch.arange(3), torch.tensor([3, 0, 0]), 4)
    assert sampled.isnan().tolist() == [False, True, True]
    assert top.isnan().all(dim=-1).tolist() == [False, True, True]
    assert ((ids >= 0) & (ids < VOCAB)).all()


# Operations, and passes over the logits: the mean over the rows, and the maximum of a row.
BUDGETS = {
    "greedy": (1, 1, 1),
    "temperature": (1, 2, 2),
    "top-k": (1, 2, 2),
    "top-p 0.95": (1, 3, 3),
    "top-p 0.5": (1, 2, 2),
    "top-p 0.1, temperature 2": (1, 2, 2),
    "top-p 0.3, temperature 10": (1, 3, 3),
    "top-k and top-p": (1, 2, 2),
    "top-k 5,000": (1, 3, 3),
    "top-k 5,000, top-p 0.95": (1, 3, 3),
    "top-k 5,000, top-p 0.5": (1, 3, 3),
    "min-p": (1, 2, 2),
    "log probabilities": (3, 3.001, 3.001),
}


@pytest.mark.parametrize("name", counts.CASES)
def test_sampling_keeps_to_its_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows, vocab = 8, 10_000
    operations, mean, most = BUDGETS[name]
    counted = counts.count_fused(counts.CASES[name], rows, vocab)
    assert counted.operations <= operations
    assert 0 < sum(counted.passes) / rows <= mean
    assert max(counted.passes) <= most
    assert counted.bytes <= (mean + 0.01) * rows * vocab * 2
    assert counted.operations < counts.count_torch(counts.CASES[name], rows, vocab).operations


@pytest.mark.parametrize("kernel", ["sample_rows", "score_rows"])
def test_nothing_runs_beside_a_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budgets above count a call of a kernel as one operation."""
    launches = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *_arguments, **_options: launches.append(grid)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    called: list[str] = []
    monkeypatch.setattr(fused_kernels, kernel, Kernel())
    logits, parameters, rows = make_logits(3, VOCAB, torch.bfloat16), make_parameters(3), torch.arange(3)
    with Names():
        if kernel == "sample_rows":
            sample_rows_by_triton(logits, parameters)
        else:
            score_rows_by_triton(logits, rows, rows, 5)
    assert launches == [(3,)]
    assert set(called) == {"aten::new_empty"}


@pytest.mark.parametrize("filters", [{"top_k": 3_000}, {"top_k": 2_000, "top_p": 0.9}])
def test_a_large_top_k_keeps_to_the_budget(filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    counted = counts.count_fused(filters, 2, 40_000)
    assert max(counted.passes) == 2


def test_log_probabilities_of_few_possible_tokens_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a grammar that leaves three tokens."""
    monkeypatch.undo()
    logits = torch.full((2, 10_000), -torch.inf)
    logits[:, [5, 700, 9_000]] = 1.0
    with counts._count_loads(logits) as loads:
        _, ids, top = score_rows_by_triton(logits, torch.arange(2), torch.tensor([5, 700]), 6)
    assert (loads / 10_000 < 2.01).all()
    assert ids.tolist() == [[5, 700, 9_000, 0, 1, 2]] * 2
    assert top[:, 3:].isneginf().all()


@pytest.mark.parametrize("kind", ["all equal", "thousands of the largest", "few values"])
def test_log_probabilities_of_equal_logits_keep_to_the_budget(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than the kernel can copy are as likely as the 20th."""
    monkeypatch.undo()
    vocab, tokens = 40_000, torch.tensor([5, 700])
    logits = torch.zeros(2, vocab)
    if kind == "thousands of the largest":
        logits[0, ::4] = logits[1, 39_000:] = logits[1, ::5] = 1.0
        logits[1, [7, 20_001]] = 2.0
    elif kind == "few values":
        logits = 20 + 0.05 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    logits = logits.bfloat16()
    with counts._count_loads(logits) as loads:
        sampled, ids, top = score_rows_by_triton(logits, torch.arange(2), tokens, 20)
    assert (loads / vocab < 2.01).all()
    expected = score_rows(logits, torch.arange(2), tokens, 20)
    assert ids.tolist() == expected[1].tolist()
    for found, right in ((sampled, expected[0]), (top, expected[2])):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-6)


def test_scores_do_not_depend_on_the_type_of_the_logits() -> None:
    """A row that needs a logits processor makes the logits of all rows float32."""
    logits = make_logits(8, VOCAB, torch.bfloat16)
    which, tokens = torch.arange(8), torch.arange(8)
    for one, other in zip(
        score_rows_by_triton(logits, which, tokens, 4),
        score_rows_by_triton(logits.float(), which, tokens, 4),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_the_check_before_serving_compares_with_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_kernels(VOCAB, torch.bfloat16, torch.device("cpu")) is None
    real = fused.sample_rows
    with monkeypatch.context() as patch:
        calls = iter(range(10))
        patch.setattr(fused, "sample_rows", lambda x, y: real(x if next(calls) % 2 else -x, y))
        assert try_kernels(VOCAB, torch.bfloat16, torch.device("cpu")) == "they draw other tokens than a CPU"
    monkeypatch.setattr(fused, "sample_rows", lambda logits, parameters: 1 / 0)
    assert try_kernels(VOCAB, torch.bfloat16, torch.device("cpu")) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}])
def test_kernels_draw_the_tokens_that_torch_draws_in_tiles_as_on_a_gpu(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    expected, drawn = both(make_logits(4, 9_000, torch.bfloat16), make_parameters(4, **filters))
    assert drawn == expected


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Without a GPU: Triton brings the assembler of CUDA. In a process of its own, without the interpreter."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, env=environment)


_COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gpu_worker.sampling import fused_kernels
from gpu_worker.sampling.fused import NUM_WARPS

OTHERS = {
    "parameters": "*i32", "scratch": "*i64", "tokens": "*i64", "failed": "*i1",
    "scale": "fp32", "rows": "*i64", "sampled": "*fp32", "top_ids": "*i64", "top": "*fp32",
}
tile = {"TILE": fused_kernels.TILE, "CAPACITY": fused_kernels.MAX_CANDIDATES}
for kernel in (fused_kernels.sample_rows, fused_kernels.score_rows):
    for dtype in ("*bf16", "*fp32"):
        types = {"logits": dtype} | OTHERS | dict.fromkeys(tile, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        # As at run time, where these addresses are multiples of 16.
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        source = ASTSource(kernel, signature, tile, aligned)
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS})
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared < 48 << 10
        # Without one, a thread reads scratch memory before another has written it. The interpreter has no threads.
        assert compiled.asm["ttgir"].count("barrier") >= 3
"""
