"""The largest logit without most of the head: the same token as of all logits, bit for bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_worker.cpu.layers import arguments as at
from gpu_worker.cpu.layers.all_layers import CpuLayers
from gpu_worker.cpu.layers.byte_products import has_byte_products
from gpu_worker.cpu.layers.logit_bounds import LogitBounds, logit_bounds
from gpu_worker.cpu.numbers import INFINITY, as_array
from gpu_worker.cpu.vectors import OUTPUTS, has_vectors
from gpu_worker.sampling.sampler import largest_logits
from tests.unit.worker.small_decoders import SmallDecoder, config_of

TYPES = [torch.float32, torch.bfloat16]
WIDTH = 192
# With tokens in the last block that are no whole block, where the head is the embedding.
VOCABS = {True: 64 * 40 + 35, False: 64 * 40}


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if not (has_vectors(request.param) and has_byte_products()):
        pytest.skip(f"this CPU has no vector instructions for {request.param} and int8")
    return request.param


@cache
def _decoder(tied: bool, dtype: torch.dtype, threads: int, width: int = WIDTH) -> SmallDecoder:
    config = config_of(vocab_size=VOCABS[tied], tie_embeddings=tied, hidden_size=width)
    return SmallDecoder(config, dtype, threads, at_once=True)


def _layers(tied: bool, dtype: torch.dtype, threads: int, width: int = WIDTH) -> CpuLayers:
    layers = _decoder(tied, dtype, threads, width).cpu_layers
    assert layers is not None
    layers._calls_without_bounds = 0
    return layers


def _hidden(rows: int, dtype: torch.dtype, seed: int = 0, width: int = WIDTH) -> Tensor:
    """Random rows; every other one has a few very large numbers, as those of large models."""
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    hidden[::2, :3] *= 50
    return hidden.to(dtype)


def _logits(layers: CpuLayers, hidden: Tensor) -> Tensor:
    """Of each row by itself, because the kernels have a limit."""
    heads = [layers.head(row) for row in hidden.split(1)]
    return torch.cat([logits for logits in heads if logits is not None])


def _assert_likeliest(layers: CpuLayers, hidden: Tensor) -> None:
    layers._calls_without_bounds = 0
    found = layers.likeliest_of(hidden)
    assert found is not None
    for ours, expected in zip(found, largest_logits(_logits(layers, hidden)), strict=True):
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_likeliest_token_is_that_of_all_logits(tied: bool, threads: int, dtype: torch.dtype) -> None:
    layers = _layers(tied, dtype, threads)
    for seed in range(25):
        for rows in (*range(1, 10), 32, 33, 50):
            _assert_likeliest(layers, _hidden(rows, dtype, seed))


def test_wide_rows_have_the_token_of_all_logits(dtype: torch.dtype) -> None:
    """Of more inputs than products.py multiplies at a time."""
    layers = _layers(False, dtype, 2, 576)
    for seed in range(10):
        _assert_likeliest(layers, _hidden(5, dtype, seed, 576))


@pytest.mark.parametrize("tied", [True, False])
def test_each_token_can_be_the_likeliest(tied: bool, dtype: torch.dtype) -> None:
    decoder, layers, vocab = _decoder(tied, dtype, 2), _layers(tied, dtype, 2), VOCABS[tied]
    tokens = [0, 1, 63, 64, vocab // 2, vocab // 64 * 64 - 1, vocab - 2, vocab - 1]
    identity = torch.eye(WIDTH).to(dtype).split(8)
    weights = torch.cat([decoder.decoder._matmul.of(rows, decoder.decoder._weights.head) for rows in identity])
    hidden = weights.T[tokens] / decoder.decoder._weights.final_norm
    assert largest_logits(_logits(layers, hidden))[0].tolist() == tokens
    _assert_likeliest(layers, hidden)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_of_tokens_without_weights_is_the_likeliest(
    threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all other logits are negative. The bounds of such a token, and of a block of them, are 0."""
    layers, ones = _layers(False, dtype, threads), torch.ones(WIDTH, dtype=dtype)
    row, head = _orthogonal(0)
    head = torch.where((head @ row > 0)[:, None], -head, head)
    head[640:704] = head[1280:1344] = head[2000] = 0
    for first in (2000, 1280, 640, 100):
        head[first] = 0
        with monkeypatch.context() as patch:
            _with_head(layers, head.to(dtype), patch)
            layers._arguments[at.FINAL_NORM] = ones.data_ptr()
            _assert_likeliest(layers, row.to(dtype)[None])


def test_a_row_of_infinite_logits_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, ones = _layers(False, dtype, 1), torch.ones(WIDTH, dtype=dtype)
    head = _head(0).to(dtype, copy=True)
    head[:, 5] = -torch.inf
    _with_head(layers, head, monkeypatch)
    layers._arguments[at.FINAL_NORM] = ones.data_ptr()
    for sign in (1, -1):
        assert largest_logits(_logits(layers, sign * ones[None]))[1].all()
        _assert_likeliest(layers, sign * ones[None])


@pytest.mark.parametrize("rows", [1, 7])
def test_most_of_the_head_is_not_read(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of tokens with much smaller logits may become NaN, if the copy does not know it."""
    layers, hidden = _layers(False, dtype, 2), _hidden(rows, dtype)
    head = torch.randn(VOCABS[False], WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    _with_head(layers, head, monkeypatch)
    logits = _logits(layers, hidden)
    tokens, _ = largest_logits(logits)
    is_far = (logits < 0.6 * logits.amax(1, keepdim=True)).all(0)
    assert is_far.float().mean() > 0.85
    head[is_far] = torch.nan
    found = layers.likeliest_of(hidden)
    assert found is not None
    assert found[0].tolist() == tokens.tolist()
    assert not found[1].any()


@pytest.mark.parametrize("tied", [True, False])
def test_other_calls_between_change_nothing(tied: bool, dtype: torch.dtype) -> None:
    layers, hidden = _layers(tied, dtype, 2), _hidden(3, dtype)
    logits = layers.head(hidden)
    assert logits is not None
    for rows in (1, 40, 2):
        _assert_likeliest(layers, hidden)
        _assert_likeliest(layers, _hidden(rows, dtype, 5))
        again = layers.head(hidden)
        assert again is not None
        assert torch.equal(again, logits)


def test_bounds_that_leave_many_blocks_are_not_used_for_a_while(dtype: torch.dtype) -> None:
    layers, hidden = _layers(False, dtype, 2), _hidden(2, dtype)
    _assert_likeliest(layers, hidden)
    assert layers.likeliest_of(hidden) is not None
    unbounded = hidden.clone()
    unbounded[1, 3] = torch.nan
    assert layers.likeliest_of(unbounded) is not None
    for _ in range(100):
        assert layers.likeliest_of(hidden) is None
    assert layers.likeliest_of(hidden) is not None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e20, 0.0, 1e-25])
def test_a_row_of_unusual_numbers_has_the_token_of_all_its_logits(value: float, dtype: torch.dtype) -> None:
    hidden = _hidden(3, dtype)
    hidden[1, 7] = value
    hidden[2] = value
    for tied in (True, False):
        _assert_likeliest(_layers(tied, dtype, 2), hidden)


@cache
def _head(seed: int) -> Tensor:
    """Rows of very different lengths. Some are equal, and some differ so little that bfloat16 cannot tell their logits
    apart."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCABS[False], WIDTH, generator=generator)
    head *= torch.rand(len(head), 1, generator=generator) ** 4
    best = head[head.norm(dim=1).argmax()].clone()
    for token in (70, 900, 901, 2000):
        head[token] = best
    for token in (300, 1500, 2100):
        head[token] = best * (1 - 0.001 * torch.rand(WIDTH, generator=generator))
    return head


def _with_head(layers: CpuLayers, head: Tensor, monkeypatch: pytest.MonkeyPatch) -> LogitBounds:
    """The layers with another head, a table [vocab, width]."""
    layers._new_likeliest(64)  # scratch memory, which all heads share
    table = as_array(head.contiguous())
    bounds = logit_bounds(table, *head.shape)
    fixed = {at.HEAD: table, at.CODES: bounds.codes, at.SCALES: bounds.scales, at.ERRORS: bounds.errors}
    fixed[at.BLOCK_BOUNDS] = bounds.blocks
    changed = layers._arguments.copy()
    for place, array in fixed.items():
        changed[place] = array.ctypes.data
    changed[at.HEAD_IS_TABLE] = 1
    monkeypatch.setattr(layers, "_arguments", changed)
    function, _, numbers = layers._addresses
    monkeypatch.setattr(layers, "_addresses", (function, changed.ctypes.data, numbers))
    monkeypatch.setattr(layers, "_kept", (layers._kept, fixed))
    return bounds


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_of_equal_logits_is_the_token(
    threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = _head(0).to(dtype, copy=True)
    layers = _layers(False, dtype, threads)
    _with_head(layers, head, monkeypatch)
    for scale in (1e-3, 1.0, 300.0):
        hidden = (scale * torch.stack((_head(0)[70], -_head(0)[70], _hidden(1, torch.float32)[0]))).to(dtype)
        _assert_likeliest(layers, hidden)
    logits = _logits(layers, hidden)
    assert (logits[0] == logits[0].max()).sum() >= 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, 0.0, 1e-25])
def test_a_token_of_unusual_weights_is_not_skipped(
    value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = _head(0).to(dtype, copy=True)
    head[1200, 5] = value
    head[1201] = value
    layers = _layers(False, dtype, 1)
    _with_head(layers, head, monkeypatch)
    for seed in range(5):
        for sign in (1, -1):
            _assert_likeliest(layers, sign * _hidden(2, dtype, seed))
    _assert_likeliest(layers, torch.zeros(1, WIDTH, dtype=dtype))


def test_logits_that_bfloat16_cannot_tell_apart_are_all_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the bounds can tell them apart, as of whole numbers."""
    if not (has_vectors(torch.bfloat16) and has_byte_products()):
        pytest.skip("this CPU has no vector instructions for bfloat16 and int8")
    head = torch.zeros(VOCABS[False], WIDTH, dtype=torch.bfloat16)
    head[2000] = 127
    head[100], head[100, 0] = 127, 90
    layers = _layers(False, torch.bfloat16, 1)
    _with_head(layers, head, monkeypatch)
    ones = torch.ones(WIDTH, dtype=torch.bfloat16)
    layers._arguments[at.FINAL_NORM] = ones.data_ptr()
    hidden = ones[None].clone()
    _assert_likeliest(layers, hidden)
    assert int(largest_logits(_logits(layers, hidden))[0]) == 100


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_bounds_are_those_of_the_copy(tied: bool, threads: int, dtype: torch.dtype) -> None:
    layers, hidden = _layers(tied, dtype, threads), _hidden(2, dtype)
    arrays = layers._kept[1]
    bounds = logit_bounds(arrays[at.HEAD], VOCABS[tied], WIDTH)
    decoder = _decoder(tied, dtype, threads).decoder
    rows = decoder.final(hidden).double().numpy()
    hidden[1, 0] = torch.nan
    assert layers.likeliest_of(hidden) is not None
    upper = layers._scratch[at.UPPER_BOUNDS].reshape(-1)[: 2 * len(bounds.blocks)].view(2, -1).numpy()
    scale = np.abs(rows[0]).max() / 127
    copy = scale * np.round(rows[0] / scale)
    most = (_copy_of(bounds) @ copy).reshape(-1, OUTPUTS).max(1)
    errors = bounds.blocks @ (np.linalg.norm(rows[0]), np.linalg.norm(rows[0] - copy))
    np.testing.assert_allclose(upper[0], most + errors, atol=float(0.05 * errors.max()))
    assert (upper[1] == np.inf).all()
    # As bits, which are in the order of positive numbers; then the block.
    found = layers._scratch[at.FOUND].reshape(-1)[: 4 * threads].view(threads, 2, 2).numpy()
    lower, block = max(found[:, 0].tolist())
    np.testing.assert_allclose(np.int32(lower).view(np.float32), (most - errors).max(), atol=float(0.05 * errors.max()))
    assert block == (most - errors).argmax()
    assert (found[:, 1, 0] <= -INFINITY).all()


def _copy_of(bounds: LogitBounds) -> np.ndarray:
    """float64 [blocks * 64, width]"""
    codes = (bounds.codes.astype(np.float64) - 128).transpose(0, 2, 1, 3)
    return codes.reshape(len(bounds.scales), -1) * bounds.scales[:, None]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.sampled_from([4, 64, 192, 1000]),
    power=st.integers(0, 8),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_a_copy_is_as_near_as_its_errors_say(seed: int, width: int, power: int, size: float) -> None:
    """The bounds hold for the exact products, with room for the rounding of float32."""
    generator = torch.Generator().manual_seed(seed)
    head = size * torch.randn(70, width, generator=generator) * torch.rand(70, width, generator=generator) ** power
    bounds = logit_bounds(as_array(head), 70, width)
    copy = _copy_of(bounds)[:70]
    row = np.random.default_rng(seed).standard_normal(width) ** (1 + 2 * (seed % 2))
    difference = np.abs(head.double().numpy() @ row - copy @ row)
    length = np.linalg.norm(row)
    lengths = head.double().norm(dim=1).numpy()
    assert (difference + 2.0**-16 * lengths * length <= bounds.errors[:70] * length).all()
    assert (bounds.errors[:70] <= 0.05 * lengths * max(1, np.sqrt(width) / 4) + 1e-29).all()


def _orthogonal(seed: int) -> tuple[Tensor, Tensor]:
    """A row, and a head with products that are small beside the lengths: so wrong bounds give another token."""
    generator = torch.Generator().manual_seed(seed)
    row, head = torch.randn(WIDTH, generator=generator), torch.randn(VOCABS[False], WIDTH, generator=generator)
    row /= row.norm()
    head -= (head @ row)[:, None] * row
    return row, head + 1e-3 * torch.randn(len(head), 1, generator=generator) * row


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-25, 1e-22, 1e-12, 1.0, 1e12, 1e17])
def test_tiny_and_huge_numbers_give_the_token_of_all_logits(
    size: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the head, in the rows, and in a part of the head. Their squares are 0 or infinite."""
    layers, ones = _layers(False, dtype, 1), torch.ones(WIDTH, dtype=dtype)
    for seed in range(5):
        row, head = _orthogonal(seed)
        negative = torch.where((head @ row > 0)[:, None], -head, head)
        mixed = torch.cat((negative[:640], size * head[640:1280], negative[1280:]))
        for factor, table in ((1.0, size * head), (size, head), (1.0, mixed)):
            with monkeypatch.context() as patch:
                _with_head(layers, table.to(dtype), patch)
                layers._arguments[at.FINAL_NORM] = ones.data_ptr()
                _assert_likeliest(layers, (factor * row).to(dtype)[None])


def test_a_block_without_bounds_and_a_row_of_zeros(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite error times a length of 0 would be NaN."""
    layers = _layers(False, dtype, 1)
    for value in (1e20, torch.nan):
        head = _head(0).to(dtype, copy=True)
        head[:64] = value
        with monkeypatch.context() as patch:
            _with_head(layers, head, patch)
            _assert_likeliest(layers, torch.zeros(1, WIDTH, dtype=dtype))


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_is_of_the_memory_that_the_kernels_read(tied: bool, dtype: torch.dtype) -> None:
    """Of a packed matrix in another order than a table."""
    decoder = _decoder(tied, dtype, 1)
    layers, vocab = _layers(tied, dtype, 1), VOCABS[tied]
    head = layers._kept[1][at.HEAD]
    bounds = logit_bounds(head, vocab, WIDTH)
    plain = torch.eye(WIDTH).to(dtype)
    expected = torch.cat([decoder.decoder._matmul.of(rows, decoder.decoder._weights.head) for rows in plain.split(8)])
    copy = _copy_of(bounds)
    assert np.abs(copy[:vocab] - expected.T.float().numpy()).max() <= bounds.scales.max() / 2 * 1.01
    assert (copy[vocab:] == copy[vocab - 1]).all()
