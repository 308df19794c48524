"""The kernel for products of a few rows computes what oneDNN computes, from the same memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.cpu import matmul
from gpu_worker.cpu.matmul import PackedMatmul, packed, packed_memory, packing, table_memory
from gpu_worker.cpu.numbers import as_array
from gpu_worker.cpu.products import MOST_ROWS, MOST_TABLE_ROWS
from gpu_worker.cpu.vectors import has_vectors
from tests.unit.worker.ready_kernels import ready_few_rows

TYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 66), (192, 640), (2816, 512)]  # [out, in]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _packed(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [out, in], and the same packed. Skips the test if the kernel cannot read it on this CPU."""
    if packing(torch.device("cpu"), dtype, few_rows=True) is None or not has_vectors(dtype):
        pytest.skip(f"this CPU has no instructions for packed {dtype}")
    weight = _random(*shape, dtype=dtype) / shape[1] ** 0.5
    return weight, packed(weight, few_rows=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_few_rows_are_multiplied_by_the_kernel(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    weight, matrix = _packed(shape, dtype)
    memory = packed_memory(matrix, dtype)
    if shape[1] % 64:  # oneDNN pads the inputs
        assert memory is None
        return
    assert memory is not None
    ours, onednn = PackedMatmul(ready_few_rows(dtype, threads)), PackedMatmul()
    bias = _random(shape[0], dtype=dtype, seed=1)
    exact = weight.float().t()
    for count in range(1, MOST_ROWS + 2):
        rows, total = _random(count, shape[1], dtype=dtype, seed=2), _random(count, shape[0], dtype=dtype, seed=3)
        expected = rows.float() @ exact
        for found, correct in (
            (ours.of(rows, matrix), expected),
            (ours.of(rows, matrix, bias), expected + bias.float()),
            (ours.added(total.clone(), rows, matrix), expected + total.float()),
        ):
            rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(found.float(), correct, rtol=rounding, atol=1e-5)
        out = torch.empty(count, shape[0], dtype=dtype)
        assert ours.of(rows, matrix, out=out) is out
        assert torch.equal(out, ours.of(rows, matrix))
    many = _random(MOST_ROWS + 1, shape[1], dtype=dtype)
    assert torch.equal(ours.of(many, matrix), onednn.of(many, matrix))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_other_rows_or_threads(dtype: torch.dtype) -> None:
    _weight, matrix = _packed((192, 640), dtype)
    memory = packed_memory(matrix, dtype)
    assert memory is not None
    rows = _random(7, 640, dtype=dtype)
    products = []
    for threads in (1, 2):
        for begin in range(7):
            for end in range(begin + 1, 8):
                out = torch.zeros(end - begin, 192, dtype=dtype)
                ready_few_rows(dtype, threads).multiply(
                    as_array(rows[begin:end]), memory, memory[:0], False, as_array(out)
                )
                products.append((begin, out))
    whole = products[6][1]
    assert len(whole) == 7
    assert all(torch.equal(out, whole[begin : begin + len(out)]) for begin, out in products)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_few_rows_are_multiplied_with_an_embedding(dtype: torch.dtype, threads: int) -> None:
    if not has_vectors(dtype):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    ours = PackedMatmul(ready_few_rows(dtype, threads))
    table = _random(301, 192, dtype=dtype) / 192**0.5
    head = table.t()
    assert table_memory(head) is not None
    rows = _random(MOST_TABLE_ROWS, 192, dtype=dtype, seed=1)
    exact = rows.float() @ table.float().t()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
    for begin in range(MOST_TABLE_ROWS):
        out = torch.empty(MOST_TABLE_ROWS - begin, 301, dtype=dtype)
        assert ours.of(rows[begin:], head, out=out) is out
        torch.testing.assert_close(out.float(), exact[begin:], rtol=rounding, atol=1e-5)
        assert torch.equal(ours.of(rows[begin : begin + 1], head), out[:1])
    many = torch.cat((rows, rows))
    assert torch.equal(ours.of(many, head), many @ head)


def test_a_head_that_the_kernel_cannot_read_is_left_to_torch() -> None:
    if not has_vectors(torch.float32):
        pytest.skip("this CPU has no vector instructions for float32")
    assert table_memory(torch.zeros(301, 100).t()) is None
    assert table_memory(torch.zeros(192, 301)) is None
    rows, table = _random(2, 100, dtype=torch.float32), _random(301, 100, dtype=torch.float32)
    assert torch.equal(PackedMatmul(ready_few_rows(torch.float32, 1)).of(rows, table.t()), rows @ table.t())


@pytest.mark.parametrize(
    ("shape", "is_packed"), [((64, 32), True), ((192, 640), True), ((40, 24), False), ((64, 23), False)]
)
def test_a_small_matrix_is_packed_only_for_the_kernel(shape: tuple[int, int], is_packed: bool) -> None:
    """oneDNN itself is slower for a small matrix of float32 than torch."""
    weight = _random(*shape, dtype=torch.float32)
    assert packed(weight, few_rows=True).is_mkldnn == is_packed
    plain = packed(weight, few_rows=False)
    assert not plain.is_mkldnn
    assert torch.equal(plain, weight.t())
    if packing(torch.device("cpu"), torch.bfloat16, few_rows=False) is not None:
        assert packed(weight.bfloat16(), few_rows=False).is_mkldnn


def test_a_matrix_in_an_unknown_order_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    _weight, matrix = _packed((192, 640), torch.float32)
    memory = packed_memory(matrix, torch.float32)
    assert memory is not None
    other = np.ascontiguousarray(memory.reshape(3, 640, 64).transpose(0, 2, 1)).ravel()
    monkeypatch.setattr(matmul, "packed_memory", lambda *_: other)
    rows, ours = _random(1, 640, dtype=torch.float32), PackedMatmul(ready_few_rows(torch.float32, 1))
    _weight, second = _packed((192, 640), torch.float32)
    with capture_logs() as logs:
        found = [ours.of(rows, one) for one in (matrix, matrix, second)]
    assert all(torch.equal(one, PackedMatmul().of(rows, matrix)) for one in found)
    assert [log["event"] for log in logs] == ["oneDNN packs matrices in an unknown order: steps of few rows are slower"]


def test_a_nan_stays_in_its_row_and_column() -> None:
    weight, _matrix = _packed((192, 640), torch.float32)
    weight[70, 3] = torch.nan
    matrix = packed(weight, few_rows=True)
    rows = _random(3, 640, dtype=torch.float32)
    rows[1, 9] = torch.nan
    found = PackedMatmul(ready_few_rows(torch.float32, 2)).of(rows, matrix).isnan()
    assert found[1].all()
    assert found[0].nonzero().flatten().tolist() == found[2].nonzero().flatten().tolist() == [70]


@pytest.mark.parametrize(("name", "value"), [("CPU_NAME", "generic"), ("CPU_FEATURES", "+avx2"), ("ENABLE_AVX", 0)])
def test_kernels_for_another_cpu_have_no_vectors(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """NUMBA_CPU_NAME and such let workers of different machines share a cache folder. LLVM would abort the worker."""
    monkeypatch.setattr(numba.config, name, value)
    assert not has_vectors(torch.float32)
    assert not has_vectors(torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_are_multiplied_in_parts(dtype: torch.dtype, threads: int) -> None:
    """1,088 inputs are three parts in bfloat16 and five in float32. The last row is the product of this row alone."""
    weight, matrix = _packed((192, 1088), dtype)
    memory = packed_memory(matrix, dtype)
    assert memory is not None
    kernel = ready_few_rows(dtype, threads)
    for count in (33, 34, 35, 36, 37, 50, 101):
        rows, total = _random(count, 1088, dtype=dtype, seed=2), _random(count, 192, dtype=dtype, seed=3)
        found, alone = total.clone(), total[-1:].clone()
        kernel.multiply(as_array(rows), memory, memory[:0], True, as_array(found))
        kernel.multiply(as_array(rows[-1:]), memory, memory[:0], True, as_array(alone))
        assert torch.equal(found[-1:], alone)
        rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
        exact = rows.float() @ weight.float().t() + total.float()
        torch.testing.assert_close(found.float(), exact, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_too_large_to_be_converted_at_once_have_the_same_products(dtype: torch.dtype, threads: int) -> None:
    """Where bfloat16 is multiplied as float32, all threads together convert up to 2^22 numbers once for all blocks."""
    weight, matrix = _packed((64, 4096), dtype)
    memory = packed_memory(matrix, dtype)
    assert memory is not None
    rows = _random(1100, 4096, dtype=dtype, seed=2)
    found, alone = torch.empty(1100, 64, dtype=dtype), torch.empty(10, 64, dtype=dtype)
    kernel = ready_few_rows(dtype, threads)
    kernel.multiply(as_array(rows), memory, memory[:0], False, as_array(found))
    kernel.multiply(as_array(rows[-10:]), memory, memory[:0], False, as_array(alone))
    assert torch.equal(found[-10:], alone)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.float(), rows.float() @ weight.float().t(), rtol=rounding, atol=1e-4)


_OTHER_FACTORS = """
import torch
from gpu_worker.cpu import numbers
numbers._SLOW_PAIRS ^= {numbers.get_host_cpu_name()}
from gpu_worker.cpu.matmul import packed, packed_memory
from gpu_worker.cpu.products import FewRows

torch.manual_seed(0)
kernel, weight = FewRows(torch.bfloat16, 1), torch.randn(128, 1088).bfloat16()
matrix = packed(weight, few_rows=True)
memory = packed_memory(matrix, torch.bfloat16)
rows = torch.randn(50, 1088).bfloat16()
exact, products = rows.float() @ weight.float().t(), []
for count in (1, 2, 7, 47, 48, 50):
    out = torch.empty(count, 128, dtype=torch.bfloat16)
    kernel.multiply(numbers.as_array(rows[:count]), memory, memory[:0], False, numbers.as_array(out))
    torch.testing.assert_close(out.float(), exact[:count], rtol=2**-8, atol=1e-3)
    products.append(out)
assert all(torch.equal(out, products[-1][: len(out)]) for out in products)
print("equal")
"""


def test_products_of_bfloat16_are_right_with_the_factors_of_other_cpus(tmp_path: Path) -> None:
    """Pairs of bfloat16 where this CPU takes float32, or the reverse. In a process of its own, because a process
    compiles only one of them."""
    _packed((192, 640), torch.bfloat16)  # or skip
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _OTHER_FACTORS], env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
