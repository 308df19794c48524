"""What a worker would refuse is found without reading weights, claiming memory, or downloading anything."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from demo import CHECKPOINT
from gpu_worker import progress
from gpu_worker.errors import ModelError, ModelTooLarge
from gpu_worker.inspection import inspect_model, read_torch
from gpu_worker.models import loader
from gpu_worker.settings import WorkerSettings
from services.runtime.memory import claims as memory_claims
from services.runtime.memory.available import GIB, AvailableMemory


@pytest.fixture(autouse=True)
def own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return memory_claims.default_folder()


def has(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    memory = AvailableMemory(int(gib * GIB), "a test")
    monkeypatch.setattr(memory_claims, "available_memory", lambda: memory)


def settings(**chosen: Any) -> WorkerSettings:
    return WorkerSettings(**{"model": str(CHECKPOINT), "device": "cpu", **chosen})


def test_the_demo_model_is_accepted_and_nothing_is_claimed(own_claims: Path) -> None:
    found = inspect_model(settings())
    assert (found.folder, found.architecture, found.dtype, found.device) == (
        CHECKPOINT, "LlamaForCausalLM", "float32", "cpu"
    )  # fmt: skip
    stored = sum(file.stat().st_size for file in CHECKPOINT.glob("*.safetensors"))
    assert found.file_bytes == pytest.approx(stored, rel=0.02)
    assert found.max_model_len == 2048
    assert list(own_claims.glob("*.json")) == []


def test_a_model_that_a_worker_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="max_model_len 4096 is more than the model's 2048"):
        inspect_model(settings(max_model_len=4096))
    has(monkeypatch, 0.001)
    with pytest.raises(ModelTooLarge, match="does not fit into memory"):
        inspect_model(settings())


def test_a_pool_that_memory_limits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 8)
    whole = inspect_model(settings(kv_cache_gib=1))
    assert whole.pool_bytes == whole.wanted_pool_bytes == pytest.approx(GIB, rel=0.01)
    has(monkeypatch, 0.5)
    cut = inspect_model(settings(kv_cache_gib=1))
    assert cut.wanted_pool_bytes == whole.wanted_pool_bytes
    assert cut.pool_bytes == pytest.approx(0.9 * 0.5 * GIB, rel=0.02)


def test_weights_on_a_hub_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CHECKPOINT / "config.json").read_text())
    monkeypatch.setattr(loader, "checkpoint_folder", lambda *_: tmp_path)
    monkeypatch.setattr(loader, "more_files", lambda *_: pytest.fail("a download"))
    found = inspect_model(settings(model="owner/name"))
    assert (found.absent, found.file_bytes) == (("model.safetensors",), 0)
    assert found.weights_bytes > 0


def test_tensors_of_another_shape_are_found_without_reading_them(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    (tmp_path / "model.safetensors").symlink_to(CHECKPOINT / "model.safetensors")
    with pytest.raises(ModelError, match="has shape"):
        inspect_model(settings(model=str(tmp_path)))


def test_torch_tells_its_build() -> None:
    assert read_torch().version == torch.__version__


def test_a_long_load_has_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    with progress.build_progress("m") as reports:
        for percent in range(101):
            reports.load(percent * 2**20, 100 * 2**20)
            now_s += 2.0 if percent < 10 else 0.1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [f"loading m: {percent} % of 100 MiB" for percent in (1, 4, 7, 10)]
    assert lines[4:] == [f"loading m: {percent} % of 100 MiB" for percent in range(20, 101, 10)]


def test_the_second_capture_has_its_own_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole graphs, then piece graphs."""
    now_s = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    with progress.build_progress("m") as reports:
        for total in (4, 10):
            for done in range(total + 1):
                reports.capture(done, total)
                now_s += 1.5
    lines = capsys.readouterr().err.splitlines()
    expected = [f"{percent} % of 4" for percent in (25, 50, 75, 100)]
    expected += [f"{percent} % of 10" for percent in range(10, 101, 10)]
    assert lines == [f"capturing CUDA graphs: {one}" for one in expected]
