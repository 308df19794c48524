"""Workers with int8 weights: products, memory, and what is refused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from demo import CHECKPOINT
from gpu_worker import build as build_module
from gpu_worker.build import BuiltWorker, check_quantization
from gpu_worker.cpu.int8 import Int8Matmul, can_multiply_int8, packed_int8
from gpu_worker.cpu.kernels import Int8Kernels
from gpu_worker.errors import ModelError
from gpu_worker.fits import memory_need
from gpu_worker.inspection import inspect_model
from gpu_worker.models.config import read_config
from gpu_worker.models.int8 import LARGEST, Int8Embedding, Int8Matrix, quantize
from gpu_worker.models.loader import load_model
from gpu_worker.models.weights import DecoderWeights, assemble, expected_tensors
from gpu_worker.settings import WorkerSettings
from tests.support import embedding_checkpoints
from tests.unit.worker.driver import Driver
from tests.unit.worker.families import Reference
from tests.unit.worker.inputs import Inputs

CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16
TYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not can_multiply_int8(), reason="this CPU has no VNNI instructions")


@cache
def _matmul(dtype: torch.dtype, threads: int) -> Int8Matmul:
    return Int8Matmul(Int8Kernels(dtype, threads))


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dequantized(weight: Tensor) -> Tensor:
    """float32 [out, in]: what int8 keeps of the weight."""
    values, scales = quantize(weight)
    return values * scales


@given(seed=st.integers(0, 2**32 - 1), out=st.integers(1, 40), width=st.integers(1, 200), exponent=st.integers(-30, 30))
@settings(max_examples=200, deadline=None)
def test_each_weight_is_within_half_of_its_scale(seed: int, out: int, width: int, exponent: int) -> None:
    weight = _random(out, width, seed=seed) * 2.0**exponent
    values, scales = quantize(weight)
    assert ((values * scales - weight.float()).abs() / scales).max() <= 0.5001
    assert torch.equal(quantize(-weight)[0], -values)


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = _random(3, 32)
    weight[1] = 0
    assert torch.equal(dequantized(weight)[1], torch.zeros(32))


@pytest.mark.parametrize("dtype", TYPES)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), out=st.integers(1, 70), width=st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_products_are_those_of_the_dequantized_matrix(
    dtype: torch.dtype, seed: int, rows: int, out: int, width: int
) -> None:
    _check_products(dtype, rows, out, width, seed)


# Real widths, with one tile of rows and with several.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 8, 300])
@pytest.mark.parametrize(("out", "width"), [(9728, 896), (512, 1408)])
def test_large_products_are_those_of_the_dequantized_matrix(
    dtype: torch.dtype, rows: int, out: int, width: int
) -> None:
    _check_products(dtype, rows, out, width, seed=0)


def _check_products(dtype: torch.dtype, count: int, out: int, width: int, seed: int) -> None:
    """Only the weights are rounded to 8 bits. Rows with one large number among many small ones are the hardest."""
    weight = _random(out, width, seed=seed, dtype=dtype) / width**0.5
    matmul, matrix = _matmul(dtype, 1), packed_int8(weight)
    assert matrix.shape == (width, out)
    rows, bias = _random(count, width, seed=seed + 1, dtype=dtype), _random(out, seed=seed + 2, dtype=dtype)
    rows[-1, 0] = 30
    total = _random(count, out, seed=9, dtype=dtype)
    exact = rows.double() @ dequantized(weight).double().t()

    def close(ours: Tensor, expected: Tensor) -> None:
        assert ours.dtype == dtype
        # A row's error: each number is off by at most scale / 508 (half a step of the low part, cpu/int8.py), and the
        # result is rounded once to `dtype`.
        low = rows.double().abs().amax(1, keepdim=True) / LARGEST / 508
        allowed = low * dequantized(weight).double().abs().sum(1) + 1e-6
        allowed += expected.abs() * (2**-8 if dtype == torch.bfloat16 else 1e-6)
        assert ((ours.double() - expected).abs() <= allowed).all()

    close(matmul.of(rows, matrix), exact)
    close(matmul.of(rows, matrix, bias), exact + bias.double())
    written = torch.empty(count, out, dtype=dtype)
    assert matmul.of(rows, matrix, out=written) is written
    assert torch.equal(written, matmul.of(rows, matrix))
    close(matmul.added(total.clone(), rows, matrix), exact + total.double())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, threads: int) -> None:
    matmul = _matmul(dtype, threads)
    matrix = packed_int8(_random(2816, 512, dtype=dtype))
    rows = _random(400, 512, seed=1, dtype=dtype)
    whole = matmul.of(rows, matrix)
    for first, count in ((0, 1), (7, 5), (399, 1), (100, 200)):
        assert torch.equal(matmul.of(rows[first : first + count], matrix), whole[first : first + count])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, bad: float) -> None:
    matrix = packed_int8(_random(64, 48, dtype=dtype))
    for count in (3, 40):
        rows = _random(count, 48, dtype=dtype)
        rows[1, 5] = bad
        finite = _matmul(dtype, 1).of(rows, matrix).isfinite()
        assert finite.all(1).tolist() == finite.any(1).tolist() == [i != 1 for i in range(count)]


def test_a_row_of_zeros_has_the_product_zero() -> None:
    product = _matmul(torch.float32, 1).of(torch.zeros(2, 48), packed_int8(_random(64, 48)))
    assert torch.equal(product, torch.zeros(2, 64))


def test_rows_of_an_embedding_are_dequantized() -> None:
    table = _random(40, 48)
    rows = Int8Embedding(*quantize(table), BFLOAT16).index_select(0, torch.tensor([3, 3, 39]))
    assert torch.equal(rows, dequantized(table)[[3, 3, 39]].to(BFLOAT16))


def loaded(folder: Path) -> DecoderWeights:
    return load_model(
        str(folder), device=CPU, dtype="bfloat16", pack_for=lambda _: packed_int8, quantized_embedding=True
    ).weights


@pytest.mark.parametrize("name", ["llama-tied", "llama3-rope", "qwen2", "qwen3"])
def test_weights_take_the_memory_that_was_checked_before(name: str, reference: Callable[[str], Reference]) -> None:
    folder = reference(name).folder
    weights = loaded(folder)
    assert isinstance(weights.embedding, Int8Embedding)
    held = weights.embedding.values.nbytes + 2 * weights.embedding.scales.nbytes
    held += weights.final_norm.nbytes
    packed: list[Any] = [weights.head]
    for layer in weights.layers:
        packed += [layer.qkv, layer.output, layer.gate_up, layer.down]
        vectors = layer.input_norm, layer.mlp_norm, layer.qkv_bias, layer.query_norm, layer.key_norm
        held += sum(vector.nbytes for vector in vectors if vector is not None)
    for matrix in packed:
        assert isinstance(matrix, Int8Matrix)
        held += math.prod(matrix.shape) + 2 * matrix.scales.nbytes
    need = memory_need(WorkerSettings(model=str(folder), quantization="int8"), read_config(folder), BFLOAT16)
    assert held == need.weights_bytes


def test_an_embedding_model_holds_no_head(tmp_path: Path) -> None:
    folder = embedding_checkpoints.make("llama", tmp_path, "last")
    weights = loaded(folder)
    assert isinstance(weights.head, Tensor)
    assert weights.head.numel() == 0
    config = replace(read_config(folder), has_head=False)
    settings = WorkerSettings(model=str(folder), quantization="int8")
    need = memory_need(settings, config, BFLOAT16).weights_bytes
    with_head = memory_need(settings, replace(config, has_head=True, tie_embeddings=True), BFLOAT16).weights_bytes
    assert with_head - need == config.vocab_size * (config.hidden_size + 8)


def test_matrices_are_quantized_one_after_the_other() -> None:
    """Loading needs the memory of the quantized weights and of one fused matrix, not of all weights."""
    config = read_config(CHECKPOINT)
    shapes = expected_tensors(config)
    live: dict[str, int] = {}
    most = 0

    def source(name: str) -> Tensor:
        nonlocal most
        tensor = torch.zeros(shapes[name], dtype=BFLOAT16)
        if tensor.ndim == 2:
            live[name] = tensor.nbytes
            weakref.finalize(tensor, live.pop, name)
            most = max(most, sum(live.values()))
        return tensor

    assemble(config, source, packed_int8, quantized_embedding=True)
    need = memory_need(WorkerSettings(model="m", quantization="int8"), config, BFLOAT16)
    assert 0 < most <= need.loading_bytes
    assert live == {}


def test_the_largest_tensor_counts_in_three_types_while_it_is_quantized() -> None:
    config = replace(read_config(CHECKPOINT), vocab_size=32000)  # in a file of float32
    need = memory_need(WorkerSettings(model="m", quantization="int8"), config, BFLOAT16)
    assert need.loading_bytes == config.vocab_size * config.hidden_size * (2 + 1 + 4)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
def test_tokens_are_those_of_the_dequantized_model(
    name: str, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    """transformers computes with the same weights in float32. Later tokens may differ by rounding to bfloat16."""
    folder = reference(name).folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            rounded = parameter.to(BFLOAT16)
            parameter.copy_(dequantized(rounded) if parameter.ndim == 2 else rounded)
    driver = Driver(build(folder, dtype="bfloat16", quantization="int8").runner, chunk_tokens=9)
    prompts = [list(range(5, 5 + n)) for n in (1, 3, 20, 40)]
    sequences = [driver.add(prompt, 4) for prompt in prompts]
    driver.run()
    with torch.inference_mode():
        expected = [int(model(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    assert [sequence.output[0] for sequence in sequences] == expected


def test_vectors_of_an_embedding_model_stay_near(tmp_path: Path, build: Callable[..., BuiltWorker]) -> None:
    folder = embedding_checkpoints.make("qwen2", tmp_path, "mean")
    tokens = list(range(5, 45))
    [vector] = Inputs(build(folder, quantization="int8").runner, 1000).run([tokens]).values()
    assert float(vector @ embedding_checkpoints.expected(folder, tokens, "mean")) > 0.99  # both have length 1


def test_the_type_that_is_registered_names_int8(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    folder = reference("llama-tied").folder
    plain, quantized = (build(folder, dtype="bfloat16", quantization=name).info for name in ("none", "int8"))
    assert (plain.dtype, quantized.dtype) == ("bfloat16", "bfloat16+int8")
    assert plain.fingerprint == quantized.fingerprint


def test_a_worker_that_cannot_multiply_int8_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="quantization int8 is for CPUs; this worker's device is cuda"):
        check_quantization(WorkerSettings(quantization="int8"), torch.device("cuda", 0))
    with pytest.raises(ModelError, match="not supported for float16; use bfloat16 or float32"):
        inspect_model(WorkerSettings(model=str(CHECKPOINT), device="cpu", quantization="int8", dtype="float16"))
    monkeypatch.setattr(build_module, "can_multiply_int8", lambda: False)
    with pytest.raises(ModelError, match="quantization int8 needs a CPU with AVX-512 VNNI"):
        check_quantization(WorkerSettings(quantization="int8"), CPU)
    check_quantization(WorkerSettings(), torch.device("cuda", 0))
