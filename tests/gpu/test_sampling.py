"""Sampling on a GPU: the host does not wait for the GPU, and the results are those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.device import fetch
from gpu_worker.sampling.filters import beyond_by_radix, mask_top_p, mask_typical_p, whole_weights
from gpu_worker.sampling.fused import parameters_of, sample_rows, score_rows, try_kernels
from gpu_worker.sampling.gumbel import draw, draw_keys, noise_bits
from gpu_worker.sampling.logits_processors import LogitsProcessors
from gpu_worker.sampling.sampler import sample
from tests.unit.worker.test_logits_processors import start
from tests.unit.worker.test_no_waiting import ASKED, BANS, PER_ROW, ROWS, SCORES, VOCAB
from tests.unit.worker.test_sampling import make_rows

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that it is a prototype
def test_torch_detects_no_wait_for_the_device(fused: bool) -> None:
    """With all sampling parameters. Only the second run is checked: the first one may set up kernels and memory."""
    processors = LogitsProcessors(VOCAB, ROWS, DEVICE)
    start(processors, range(4), [[1, 2, 3]] * 4, [2] * 4, list(ASKED.values()))
    for mode in ("default", "error"):
        batch = processors.of(np.arange(ROWS, dtype=np.int32))
        assert batch is not None
        logits = torch.randn(ROWS, VOCAB, device=DEVICE)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            sampled = sample(logits, make_rows(ROWS, **PER_ROW, **BANS, **SCORES), batch, fused=fused)
            batch.record(sampled.tokens)
            tokens = fetch(sampled.tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.parametrize("vocab", [1000, 128_256])
def test_equal_weights_give_equal_filters_on_cpu_and_gpu(vocab: int) -> None:
    """Both devices get the weights of the CPU, because exp() on a GPU differs in its last bit."""
    logits = (3 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    weights = whole_weights(logits)
    wanted = torch.linspace(0.01, 1, 40, dtype=torch.float64).unsqueeze(-1) * weights.double().sum(-1, keepdim=True)
    here = beyond_by_radix(logits, weights, wanted)
    there = beyond_by_radix(logits.to(DEVICE), weights.to(DEVICE), wanted.to(DEVICE))
    assert torch.equal(here, there.cpu())


def test_a_row_is_filtered_and_drawn_alike_in_any_batch() -> None:
    """Every logit is equal bit for bit. With running sums of floats on a GPU it would not be."""
    row = (3 * torch.randn(1, 128_256, device=DEVICE)).bfloat16().float()
    others = 3 * torch.randn(200, 128_256, device=DEVICE)
    share = torch.full((201,), 0.9, device=DEVICE)
    keys = torch.from_numpy(draw_keys(np.full(201, 7, np.uint64), np.full(201, 37))).to(DEVICE)
    for mask in (mask_top_p, mask_typical_p):
        alone = mask(row, share[:1])
        token = draw(alone, keys[:1])
        for place in (0, 1, 7, 64, 200):
            batch = torch.cat((others[:place], row, others[: (place * 7) % 50]))
            kept = mask(batch, share[: len(batch)])
            assert torch.equal(kept[place], alone[0])
            assert draw(kept, keys[: len(batch)])[place] == token[0]


def test_sampling_noise_is_equal_on_cpu_and_gpu() -> None:
    keys = torch.from_numpy(draw_keys(np.arange(9, dtype=np.uint64), np.arange(9)))
    assert torch.equal(noise_bits(keys.to(DEVICE), 128_256).cpu(), noise_bits(keys, 128_256))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_kernels_sample_and_score_as_torch_does(dtype: torch.dtype) -> None:
    """Rounding may let another token win if two logits with noise are almost equal: in less than 1 % of the rows."""
    assert try_kernels(128_256, dtype, DEVICE) is None
    count = 256
    rng = np.random.default_rng(0)
    columns = {
        "temperature": rng.choice([0, 0.3, 1, 1.7], count),
        "min_p": rng.choice([0, 0, 0.05], count),
        "top_p": rng.choice([1, 0.9, 0.5, 0.05], count),
        "top_k": rng.choice([0, 1, 20, 500, 3000, 5000, 50_000], count),
    }
    keys = draw_keys(np.arange(count, dtype=np.uint64), np.full(count, 5))
    parameters = torch.from_numpy(parameters_of(columns, keys))
    logits = (3 * torch.randn(count, 128_256, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected, _ = sample_rows(logits, parameters)
    drawn, failed = sample_rows(logits.to(DEVICE), parameters.to(DEVICE))
    assert not failed.any()
    assert (drawn.cpu() != expected).sum() <= 2
    rows = torch.arange(0, count, 3)
    scores = score_rows(logits, rows, expected[rows], 20)
    on_gpu = score_rows(logits.to(DEVICE), rows.to(DEVICE), expected[rows].to(DEVICE), 20)
    for there, here in zip(on_gpu, scores, strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-5)


def test_a_row_has_the_same_token_alone_with_triton_kernels() -> None:
    logits = 3 * torch.randn(64, 128_256, device=DEVICE)
    columns = {name: np.full(64, value) for name, value in {"temperature": 1, "min_p": 0, "top_p": 0.9}.items()}
    columns["top_k"] = np.repeat([0, 50], 32)
    keys = draw_keys(np.arange(64, dtype=np.uint64), np.zeros(64, np.int64))
    parameters = torch.from_numpy(parameters_of(columns, keys)).to(DEVICE)
    together, _ = sample_rows(logits, parameters)
    alone = [sample_rows(logits[row : row + 1], parameters[row : row + 1])[0] for row in range(64)]
    assert torch.equal(torch.cat(alone), together)
