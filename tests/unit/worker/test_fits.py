"""A model that does not fit into memory is refused before any of its weights is fetched or read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from demo import CHECKPOINT
from gpu_worker import fits
from gpu_worker.build import build_worker
from gpu_worker.errors import ModelTooLarge
from gpu_worker.fits import block_bytes, check_fits, cpu_blocks, head_copy_bytes, memory_need
from gpu_worker.models.config import parse_config, read_config
from gpu_worker.models.loader import load_model
from gpu_worker.settings import WorkerSettings
from services.runtime import processes
from services.runtime.exit_status import NO_MEMORY
from services.runtime.memory import claims as memory_claims
from services.runtime.memory.available import GIB, AvailableMemory
from services.runtime.processes import started

CPU = torch.device("cpu")
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
CONFIG_70B = parse_config(LLAMA_70B, {})


def settings(**chosen: Any) -> WorkerSettings:
    return WorkerSettings(**{"model": "llama-70b", **chosen})


@pytest.fixture(autouse=True)
def own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own folder of claims, without claims of the workers of other tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def another_worker(num_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """A process that claims memory, and takes none of it."""
    code = f"""
import tempfile
from services.runtime.memory import claims as memory_claims
tempfile.tempdir = {tempfile.gettempdir()!r}
with memory_claims.lock() as claims:
    claims.claim({num_bytes})
print("claimed", flush=True)
input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(gib: float) -> None:
        available = AvailableMemory(int(gib * GIB), f"a cgroup limit of {gib:.1f} GiB")
        monkeypatch.setattr(memory_claims, "available_memory", lambda: available)

    return give


def test_weights_count_in_the_type_that_they_are_served_in() -> None:
    bfloat16 = memory_need(settings(), CONFIG_70B, torch.bfloat16)
    float32 = memory_need(settings(), CONFIG_70B, torch.float32)
    assert bfloat16.weights_bytes == 70_553_706_496 * 2  # as its model card says: 70.6 billion parameters
    assert float32.weights_bytes == 2 * bfloat16.weights_bytes


def test_the_demo_model_is_as_large_as_its_file() -> None:
    config = read_config(CHECKPOINT)
    stored = sum(file.stat().st_size for file in CHECKPOINT.glob("*.safetensors"))
    need = memory_need(settings(), config, getattr(torch, config.dtype))
    assert need.weights_bytes == pytest.approx(stored, rel=0.02)


def test_the_refusal_names_both_sizes_and_what_helps(has: Any) -> None:
    has(24)
    with pytest.raises(ModelTooLarge) as refused:
        check_fits(settings(), CONFIG_70B, torch.float32, CPU)
    text = str(refused.value)
    assert text.startswith("llama-70b does not fit into memory: it needs 268.3 GiB (weights as float32 262.8 GiB; ")
    assert "24.0 GiB are available (a cgroup limit of 24.0 GiB)" in text
    assert text.endswith("what helps: a smaller model, --dtype bfloat16 (weights of 131.4 GiB), "
                         "--quantization int8, more memory")  # fmt: skip
    assert "\n" not in text


def test_a_model_fits_as_bfloat16_where_it_does_not_as_float32(has: Any) -> None:
    has(150)
    check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)
    with pytest.raises(ModelTooLarge):
        check_fits(settings(), CONFIG_70B, torch.float32, CPU)


def test_int8_weights_count_as_int8(has: Any) -> None:
    quantized = settings(quantization="int8")
    need = memory_need(quantized, CONFIG_70B, torch.bfloat16)
    assert 70_553_706_496 < need.weights_bytes < 1.001 * 70_553_706_496  # a byte per parameter, and the scales
    has(75)
    check_fits(quantized, CONFIG_70B, torch.bfloat16, CPU)
    has(60)
    with pytest.raises(ModelTooLarge, match=r"weights as bfloat16\+int8 65\.8 GiB"):
        check_fits(quantized, CONFIG_70B, torch.bfloat16, CPU)


def test_the_copy_of_a_large_head_counts(has: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the need, in the claim, and before the pool gets a share of the memory."""
    for check in ("has_vectors", "has_byte_products"):
        monkeypatch.setattr(fits, check, lambda *_: True)
    one_layer = replace(CONFIG_70B, num_layers=1)
    need, copy = memory_need(settings(), one_layer, torch.bfloat16), 128256 * (8192 + 8)
    assert need.head_copy_bytes == copy
    assert need.num_bytes == need.weights_bytes + max(need.loading_bytes, copy + need.pool_bytes)
    wanted = settings(kv_cache_gib=8.0, max_num_seqs=16384)
    one_block = block_bytes(wanted, one_layer, torch.bfloat16)
    has(5)
    assert cpu_blocks(wanted, one_layer, torch.bfloat16, 131072) == int(0.9 * (5 * GIB - copy)) // one_block
    [path] = memory_claims.default_folder().glob("*.json")
    claimed = json.loads(path.read_text())["num_bytes"]
    assert claimed == copy + int(0.9 * (5 * GIB - copy)) // one_block * one_block
    with pytest.raises(ModelTooLarge, match=r"GiB of KV blocks and 1\.0 GiB for a copy of the head\)"):
        check_fits(settings(), one_layer, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    "changes",
    [{"quantization": "int8"}, {"deterministic": True}, {"attention_backend": "torch"}, {"dtype": "float16"}],
    ids=str,
)
def test_no_copy_counts_where_there_is_none(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer = replace(CONFIG_70B, num_layers=1)
    dtype = getattr(torch, changes.get("dtype", "bfloat16"))
    assert head_copy_bytes(settings(**changes), one_layer, dtype) == 0
    for check in ("has_vectors", "has_byte_products"):
        with monkeypatch.context() as patch:
            patch.setattr(fits, check, lambda *_: False)
            assert head_copy_bytes(settings(), one_layer, torch.bfloat16) == 0
    assert head_copy_bytes(settings(), CONFIG_70B, torch.bfloat16) == 0  # 1.5 % of the weights
    assert head_copy_bytes(settings(), replace(one_layer, has_head=False), torch.bfloat16) == 0


def test_blocks_that_were_asked_for_count(has: Any) -> None:
    has(150)
    block_gib = 2 * 80 * 8 * 128 * 16 * 2 / GIB
    room = int((150 - memory_need(settings(), CONFIG_70B, torch.bfloat16).weights_bytes / GIB) / block_gib)
    check_fits(settings(num_blocks=room - 1), CONFIG_70B, torch.bfloat16, CPU)
    with pytest.raises(ModelTooLarge, match=f"fewer than --num-blocks {room + 1}, more memory"):
        check_fits(settings(num_blocks=room + 1), CONFIG_70B, torch.bfloat16, CPU)


def test_a_second_worker_that_does_not_fit_beside_the_first_is_refused(has: Any) -> None:
    has(150)
    need = memory_need(settings(), CONFIG_70B, torch.bfloat16)
    with another_worker(need.num_bytes) as other:
        with pytest.raises(ModelTooLarge) as refused:
            check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)
        claimed = f"less {need.num_bytes / GIB:.1f} GiB that other workers have yet to fill"
        assert f"GiB are available (a cgroup limit of 150.0 GiB, {claimed})" in str(refused.value)
        other.kill()
        other.wait()
        check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)  # a worker that was killed claims nothing


def test_memory_that_another_worker_has_filled_is_not_counted_twice(has: Any) -> None:
    has(150)
    need = memory_need(settings(), CONFIG_70B, torch.bfloat16)
    with another_worker(need.num_bytes) as other:
        [path] = memory_claims.default_folder().glob("*.json")
        claim = json.loads(path.read_text())
        path.write_text(json.dumps({**claim, "before_bytes": claim["before_bytes"] - need.num_bytes}))
        check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)
        assert other.poll() is None


def test_a_pool_on_a_cpu_leaves_the_memory_that_other_workers_claimed(has: Any) -> None:
    has(10)
    wanted = settings(kv_cache_gib=8.0, max_num_seqs=16384)
    one_block = block_bytes(wanted, CONFIG_70B, torch.bfloat16)
    assert cpu_blocks(wanted, CONFIG_70B, torch.bfloat16, 131072) == int(8 * GIB) // one_block
    with another_worker(5 * GIB):
        assert cpu_blocks(wanted, CONFIG_70B, torch.bfloat16, 131072) == int(0.9 * 5 * GIB) // one_block
    with another_worker(10 * GIB):  # never fewer than check_fits asks for
        smallest = memory_need(wanted, CONFIG_70B, torch.bfloat16).pool_bytes // one_block
        assert cpu_blocks(wanted, CONFIG_70B, torch.bfloat16, 131072) == smallest


def test_without_a_folder_for_claims_a_worker_starts(has: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    has(150)
    check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)


@pytest.mark.parametrize("kind", ["link", "open", "foreign"])
def test_a_folder_that_another_user_may_change_is_not_used(
    has: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In /tmp another user can make the folder first. A link in it would make the worker empty one of its own files."""
    precious = tmp_path / "precious"
    precious.write_text("text")
    folder = memory_claims.default_folder()
    real = tmp_path / "elsewhere" if kind == "link" else folder
    real.mkdir(mode=0o700)
    (real / "lock").symlink_to(precious)
    (real / f"{os.getpid()}.json").symlink_to(precious)
    if kind == "link":
        folder.symlink_to(real)
    elif kind == "open":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(memory_claims, "default_folder", lambda: folder)
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    has(150)
    check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)
    assert precious.read_text() == "text"


@pytest.mark.parametrize("text", ["", "[" * 100_000, '"x"', "null", "\0", "number", "pid"])
def test_a_claim_that_cannot_be_read_is_removed(has: Any, text: str) -> None:
    has(150)
    with memory_claims.lock() as claims:
        claims.claim(GIB)
    folder = memory_claims.default_folder()
    [path] = folder.glob("*.json")
    claim = {**json.loads(path.read_text()), "pid": os.getppid(), "started": started(os.getppid())}
    wrong = {"number": {**claim, "num_bytes": "1"}, "pid": {**claim, "pid": "\0"}}
    (folder / "1.json").write_text(json.dumps(wrong[text]) if text in wrong else text)
    check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)
    assert not (folder / "1.json").exists()


def test_a_worker_starts_though_it_cannot_write_its_claim(has: Any) -> None:
    """As on a full disk."""
    folder = memory_claims.default_folder()
    folder.mkdir(mode=0o700)
    (folder / f"{os.getpid()}.json").mkdir()
    has(150)
    check_fits(settings(), CONFIG_70B, torch.bfloat16, CPU)


def test_blocks_in_host_memory_count(has: Any) -> None:
    has(150)
    with pytest.raises(ModelTooLarge, match="less --host-gib"):
        check_fits(settings(host_gib=20.0), CONFIG_70B, torch.bfloat16, CPU)


def test_a_gpu_is_asked_for_its_own_memory(has: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    has(8)  # the host needs none: weights go to the device file by file
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(mem_get_info=lambda device: (150 * GIB, 160 * GIB)))
    with pytest.raises(ModelTooLarge, match=r"134\.0 GiB are available \(a GPU of 160\.0 GiB\)"):
        check_fits(settings(), CONFIG_70B, torch.bfloat16, gpu)
    check_fits(settings(gpu_memory_utilization=0.95), CONFIG_70B, torch.bfloat16, gpu)
    with pytest.raises(ModelTooLarge, match=r"needs 9\.0 GiB .*8\.0 GiB are available .*less --host-gib, more memory"):
        check_fits(settings(gpu_memory_utilization=0.95, host_gib=9.0), CONFIG_70B, torch.bfloat16, gpu)


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_claims, "available_memory", lambda: None)
    check_fits(settings(), CONFIG_70B, torch.float32, CPU)


def test_nothing_is_fetched_of_a_model_that_is_too_large(tmp_path: Path, has: Any) -> None:
    """The folder has no weights: the model is refused for its size, not for missing weights."""
    has(24)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    with pytest.raises(ModelTooLarge):
        load_model(str(tmp_path), device=CPU, check=lambda config, dtype: check_fits(settings(), config, dtype, CPU))


def test_the_process_ends_at_once_with_one_line_and_a_status_of_its_own(tmp_path: Path) -> None:
    config = {**LLAMA_70B, "intermediate_size": 2**40}  # more than any machine has
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "services.cli", "worker", "--model", str(tmp_path), "--load-format", "dummy"]
    command += ["--device", "cpu", "--metrics-port", "0", "--log-level", "error"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == NO_MEMORY
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"paceline worker: {tmp_path} does not fit into memory: it needs ")


@pytest.mark.parametrize(
    ("chosen", "tokens"), [({}, 512), ({"max_num_seqs": 300}, 600), ({"max_batched_tokens": 9}, 9)]
)
def test_a_step_on_a_cpu_has_room_for_prompts_beside_all_decodes(chosen: dict[str, int], tokens: int) -> None:
    built = build_worker(settings(model=str(CHECKPOINT), device="cpu", num_blocks=4, max_model_len=64, **chosen))
    assert built.runner.limits.max_batched_tokens == tokens


def test_the_threads_follow_the_size_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 2)
    monkeypatch.setattr(processes, "core_quota", lambda: None)
    chosen = settings(model=str(CHECKPOINT), device="cpu", num_blocks=4, max_model_len=64)
    weights_bytes = memory_need(chosen, read_config(CHECKPOINT), torch.float32).weights_bytes
    for large_bytes, local_workers, threads in (
        (weights_bytes + 1, 1, 1),
        (weights_bytes, 1, 2),
        (weights_bytes, 2, 1),
    ):
        monkeypatch.setattr(processes, "LARGE_WEIGHTS_BYTES", large_bytes)
        build_worker(chosen.model_copy(update={"local_workers": local_workers}))
        assert torch.get_num_threads() == threads
