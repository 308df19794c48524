"""The GPU bench's driver, arithmetic and planner, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import gpu
from bench.device.choices import choices
from bench.device.load import Load, LoadRequest, NoRoom
from bench.device.measure import Clock
from bench.device.shapes import SHAPES, decode_bytes, prefill_flops, weight_bytes_per_step
from gpu_worker.models.config import DecoderConfig, parse_config
from gpu_worker.steps.slots import SlotBuffers, SlotLimits
from tests.support.flashinfer_kernels import reference_kernels

LIMITS = SlotLimits(4, 32, 64, 8, 40, 97, ())


def config(name: str) -> DecoderConfig:
    return parse_config(SHAPES[name], {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no NVIDIA GPU here" in capsys.readouterr().err


def test_the_driver_runs_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--tiny", "--out", str(tmp_path / "gpu.json")]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["left_out"] == []
    tiny = report["models"]["tiny"]
    assert [(row["batch"], row["context_tokens"]) for row in tiny["decode"]] == [(1, 24), (3, 24), (1, 40), (3, 40)]
    assert [row["tokens"] for row in tiny["prefill"]] == [48, 24]
    assert tiny["serving"][0]["requests"] == 5
    assert [(row["batch"], row["context_tokens"]) for row in tiny["sampled_decode"]] == [(3, 24)]
    assert all(row["roofline_ms"] > 0 and row["idle_share"] >= 0 for row in tiny["decode"])
    assert "tiny" in capsys.readouterr().out.splitlines()[-1]


def test_a_model_left_out_for_want_of_time_is_named(tmp_path: Path) -> None:
    status = gpu.main(["--tiny", "--budget", "0", "--out", str(tmp_path / "gpu.json")])
    assert status == 1, "the exit status says that no model was measured"
    assert json.loads((tmp_path / "gpu.json").read_text())["left_out"] == ["tiny: no time"]


def test_each_choice_is_measured_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    with reference_kernels() as flashinfer:
        monkeypatch.setattr(flashinfer, "top_p_renorm_probs", lambda probs, top_p, is_deterministic: probs)
        rows = list(choices(flashinfer, Clock(device), device, torch.float32, scale=256))
    assert [row["rows"] for row in rows] == [1] * 4 + [32] * 4 + [128] * 4
    top_p = [(row["after_top_k"], row["different_rows"]) for row in rows if "after_top_k" in row]
    assert top_p == [(0, 1), (50, 1), (0, 32), (50, 32), (0, 128), (50, 128)], "all rows differ: no token is filtered"


def test_bytes_and_operations_are_those_of_public_figures() -> None:
    """From public figures of Llama-3.1-8B in bf16: 131,072 bytes of KV a token, 15.0 GB of weights a step, 114.4 + 17.6
    TFLOP for a prompt of 8,192 tokens."""
    llama = config("llama-3.1-8b")
    assert llama.kv_elements_per_token * 2 == 131_072
    assert weight_bytes_per_step(llama, 2) / 1e9 == pytest.approx(15.01, abs=0.02)
    assert decode_bytes(llama, 2, 128, 1024) / 1e9 == pytest.approx(32.2, abs=0.05)
    whole = prefill_flops(llama, [8192]) / 1e12
    assert whole == pytest.approx(114.4 + 17.6, rel=0.002)
    assert prefill_flops(llama, [1024] * 8) < whole * 1e12


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda prompt, cached, output: LoadRequest(prompt, min(cached, prompt - 1), output),
            st.integers(1, 40),
            st.integers(0, 39),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_a_worker_accepts_every_plan_of_a_load(requests: list[LoadRequest], concurrency: int) -> None:
    """SlotBuffers refuses an invalid plan. Each request samples its number of output tokens."""
    table = SlotBuffers(LIMITS)
    sampled: list[int] = []
    for step in Load(LIMITS, requests).steps(concurrency):
        rows = table.apply(step.plan)
        assert rows.num_rows == step.rows
        assert step.decodes_only == (0 < rows.num_rows == rows.num_decodes)
        assert int(rows.samples.sum()) == len(step.sampled)
        table.commit(rows)
        sampled += step.sampled
    assert np.array_equal(np.bincount(sampled), [request.output_tokens for request in requests])
    assert not table.occupied.any()


def test_a_load_that_does_not_fit_is_refused() -> None:
    load = Load(SlotLimits(4, 32, 400, 8, 5, 97, ()), [LoadRequest(30, 0, 30)])
    with pytest.raises(NoRoom):
        list(load.steps(1))
