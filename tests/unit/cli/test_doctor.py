"""`paceline doctor`: what it reads of a machine, how it judges, and that it says what `up` would refuse."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker.inspection import Inspection, TorchFacts
from services.cli.doctor import checkpoint, gpu, host, ports
from services.cli.doctor.check import Check, CheckStatus
from services.cli.doctor.gpu import Driver
from services.cli.doctor.main import DoctorSettings
from services.cli.main import main
from services.cli.servers import announced
from services.cli.up.holder import holder_of
from services.runtime.keys.source import KEYS_ENV
from services.runtime.memory.available import GIB, AvailableMemory
from services.runtime.settings import load_settings
from tests.support.ports import free_port

CPU_TORCH = TorchFacts("2.13.0+cpu", "", False)
GPU_TORCH = TorchFacts("2.13.0", "13.0", True, "NVIDIA H100", (9, 0), 80 * GIB)
DRIVER = Driver("580.1", ("NVIDIA H100 (81559 MiB)",))


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cores", "quota", "workers", "threads", "on_gpu", "status", "word"),
    [
        (16, None, 1, 15, False, CheckStatus.OK, ""),
        (64, 4.0, 1, 63, False, CheckStatus.SLOW, "63 threads, which then wait for each other: give --threads 3"),
        (64, 4.0, 2, 4, False, CheckStatus.SLOW, "8 threads, which then wait for each other: give --threads 2"),
        (64, 4.0, 5, 1, False, CheckStatus.SLOW, "5 threads, which then wait for each other: start at most 4 worker"),
        (2, None, 3, 2, False, CheckStatus.SLOW, "start at most 2 worker(s), with --threads 1"),
        (2, 0.5, 1, 1, False, CheckStatus.SLOW, "four services share 0.5 core"),
        (64, 4.0, 1, 3, False, CheckStatus.OK, ""),
        (64, 4.0, 1, 63, True, CheckStatus.OK, ""),
        (2, None, 1, 1, False, CheckStatus.SLOW, "four services share 2 core"),
        (2, 0.5, 1, 1, True, CheckStatus.SLOW, "four services share 0.5 core"),
    ],
)
def test_few_cores_and_too_many_threads_are_slow(
    cores: int, quota: float | None, workers: int, threads: int, on_gpu: bool, status: CheckStatus, word: str
) -> None:
    check = host.check_cores(cores, quota, workers, threads, on_gpu)
    assert check.status is status
    assert word in check.advice


@pytest.mark.parametrize(
    ("architecture", "flags", "dtype", "status", "word"),
    [
        ("x86_64", "avx2 avx512f avx512_bf16", "bfloat16", CheckStatus.OK, ""),
        ("x86_64", "avx2 avx512f amx_bf16", "float32", CheckStatus.OK, ""),
        ("x86_64", "avx2 avx512f", "float32", CheckStatus.NOTE, "--dtype bfloat16 would be slower"),
        ("x86_64", "avx2 avx512f", "bfloat16", CheckStatus.SLOW, "no instructions for bfloat16"),
        ("x86_64", "avx2 avx512f avx512_bf16", "float16", CheckStatus.SLOW, "no instructions for float16"),
        ("x86_64", "avx2", "float32", CheckStatus.SLOW, "256-bit"),
        ("x86_64", "sse2", "float32", CheckStatus.SLOW, "128-bit"),
        ("aarch64", "asimd sve bf16", "bfloat16", CheckStatus.OK, ""),
        ("arm64", "", "bfloat16", CheckStatus.OK, ""),
    ],
)
def test_missing_instructions_are_slow(
    architecture: str, flags: str, dtype: str, status: CheckStatus, word: str
) -> None:
    check = host.check_instructions(architecture, frozenset(flags.split()), dtype, False)
    assert check.status is status
    assert word in check.advice
    assert host.check_instructions(architecture, frozenset(flags.split()), dtype, True).status is CheckStatus.OK


def test_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor : 1\nflags : other\n")
    assert host.cpu_flags(tmp_path) == {"fpu", "avx2"}
    assert host.cpu_flags(tmp_path / "none") == frozenset()


def test_little_memory_and_few_files_are_slow() -> None:
    assert host.check_memory(AvailableMemory(GIB, "x")).status is CheckStatus.SLOW
    assert host.check_memory(AvailableMemory(8 * GIB, "a cgroup limit of 9.0 GiB")).found.endswith("9.0 GiB)")
    assert host.check_memory(None).status is CheckStatus.NOTE
    limits = (1024, 65536, None)
    statuses = [host.check_open_files(limit).status for limit in limits]
    assert statuses == [CheckStatus.SLOW, CheckStatus.OK, CheckStatus.OK]


def test_docker_is_optional() -> None:
    assert host.check_docker("28.1").status is CheckStatus.OK
    assert host.check_docker(None).status is CheckStatus.NOTE


# ── the GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("torch", "driver", "torch_status", "gpu_status"),
    [
        (CPU_TORCH, None, CheckStatus.OK, CheckStatus.SLOW),
        (GPU_TORCH, DRIVER, CheckStatus.OK, CheckStatus.OK),
        (CPU_TORCH, DRIVER, CheckStatus.SLOW, CheckStatus.SLOW),
        (replace(GPU_TORCH, sees_gpu=False, trouble="driver too old"), DRIVER, CheckStatus.SLOW, CheckStatus.SLOW),
        (replace(GPU_TORCH, capability=(7, 5)), DRIVER, CheckStatus.OK, CheckStatus.SLOW),
        (None, DRIVER, CheckStatus.FAILS, CheckStatus.SLOW),
        (None, None, CheckStatus.FAILS, CheckStatus.SLOW),
    ],
)
def test_a_gpu_counts_only_if_torch_can_use_it(
    torch: TorchFacts | None, driver: Driver | None, torch_status: CheckStatus, gpu_status: CheckStatus
) -> None:
    checks = gpu.check_torch(torch, "No module named 'torch'", driver), gpu.check_gpu(torch, driver)
    assert [check.status for check in checks] == [torch_status, gpu_status]
    assert all(check.advice for check in checks if check.status is not CheckStatus.OK)


def test_the_gpu_and_its_driver_are_named() -> None:
    assert gpu.check_gpu(GPU_TORCH, DRIVER).found == ("NVIDIA H100, 80 GiB, compute capability 9.0, driver 580.1")
    trouble = gpu.check_torch(replace(GPU_TORCH, sees_gpu=False, trouble="driver too old"), "", DRIVER)
    assert "driver too old" in trouble.advice


@pytest.mark.parametrize(
    ("versions", "why_not", "status", "word"),
    [
        ({"flashinfer-python": "0.7.2"}, "", CheckStatus.OK, ""),
        ({"flashinfer-python": "0.7.10", "flashinfer-jit-cache": "0.7.10+cu130"}, "", CheckStatus.OK, ""),
        ({}, "", CheckStatus.SLOW, "plain torch"),
        ({"flashinfer-python": "0.6.9"}, "", CheckStatus.FAILS, "0.7.2 or newer"),
        ({"flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.1"}, "", CheckStatus.FAILS, "flashinfer-cubin==0.7.2"),
        ({"flashinfer-python": "0.7.2"}, "head_dim 80 is none of 64", CheckStatus.SLOW, "head_dim 80"),
    ],
)
def test_flashinfer_must_be_there_and_of_one_version(
    versions: dict[str, str], why_not: str, status: CheckStatus, word: str
) -> None:
    check = gpu.check_flashinfer(versions, "0.7.2", True, why_not)
    assert check.status is status
    assert word in check.advice
    assert gpu.check_flashinfer(versions, "0.7.2", False, why_not).status is CheckStatus.OK


def test_the_needed_version_is_that_of_our_metadata() -> None:
    assert gpu.needed_flashinfer().count(".") == 2


def test_the_driver_is_found_with_nvidia_smi_or_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, NVIDIA H100, 81559 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu.read_driver(tmp_path) == DRIVER
    tool.write_text("#!/bin/sh\necho 'has failed'; exit 9\n")
    assert gpu.read_driver(tmp_path) is None
    (tmp_path / "proc/driver/nvidia/gpus/0000:01").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64  570.86.15  Release\n")
    assert gpu.read_driver(tmp_path) == Driver("570.86.15", ("0000:01",))


# ── ports, keys, certificates ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def settings(*argv: str) -> DoctorSettings:
    free = [word for name in ("grpc", "scheduler", "cache", "metrics") for word in (f"--{name}-port", "0")]
    return load_settings(DoctorSettings, [*free, *argv], prog="paceline doctor")


def port_check(*argv: str) -> Check:
    return ports.check_ports(settings(*argv))[0]


def test_a_port_in_use_names_the_process(busy: int) -> None:
    mine = f"(process {os.getpid()})"
    taken = port_check("--port", str(busy))
    assert taken.status is CheckStatus.FAILS
    assert mine in taken.advice
    assert holder_of(free_port()) == ""
    with announced(busy, "m", "s:1", "c:1"):
        assert holder_of(busy) == f"`paceline up` {mine}"


def test_a_default_port_in_use_is_no_failure(busy: int) -> None:
    check = ports._check_port("port", "127.0.0.1", busy, False)
    assert check.status is CheckStatus.NOTE
    assert "`up` takes a free port instead" in check.advice


def test_with_keys_of_the_environment_the_port_is_checked_at_the_chosen_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without keys the server listens on the loopback address only."""
    elsewhere = ("--host", "192.0.2.1", "--port", "0")
    assert port_check(*elsewhere).status is CheckStatus.OK
    monkeypatch.setenv(KEYS_ENV, "a-key-of-32-characters-0123456789")
    assert port_check(*elsewhere).status is CheckStatus.FAILS


def test_an_address_of_another_machine_and_a_port_given_twice_fail() -> None:
    assert port_check("--host", "192.0.2.1", "--insecure", "--port", "0").status is CheckStatus.FAILS
    port = str(free_port())
    last = ports.check_ports(settings("--port", port, "--grpc-port", port))[-1]
    assert last.status is CheckStatus.FAILS
    assert "already another service's" in last.advice


def test_keys_and_certificates_are_read_as_up_reads_them(tmp_path: Path) -> None:
    assert ports.check_access(settings()).status is CheckStatus.OK
    assert ports.check_access(settings("--host", "0.0.0.0")).status is CheckStatus.NOTE
    for flags in (("--tls-dir", str(tmp_path)), ("--keys-file", str(tmp_path / "none"))):
        check = ports.check_access(settings(*flags))
        assert check.status is CheckStatus.FAILS
        assert str(tmp_path) in check.advice


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────

FITS = Inspection(
    folder=Path("/m"), architecture="LlamaForCausalLM", dtype="float32", device="cpu", makes_embeddings=False,
    max_model_len=4096, file_bytes=2 * GIB, absent=(), download_bytes=4 * GIB, weights_bytes=4 * GIB,
    host_bytes=5 * GIB, available=AvailableMemory(16 * GIB, "the machine's memory"), wanted_pool_bytes=GIB,
    pool_bytes=GIB, no_flashinfer="",
)  # fmt: skip


def test_a_model_that_fits_is_ok_and_one_with_a_cut_pool_is_slow() -> None:
    assert checkpoint.check_checkpoint("m", FITS).status is checkpoint.check_fit(FITS, 3).status is CheckStatus.OK
    cut = checkpoint.check_fit(replace(FITS, pool_bytes=GIB // 2), 1)
    assert cut.status is CheckStatus.SLOW
    assert "only 0.5 GiB of KV instead of 1.0 GiB" in cut.advice


def test_workers_that_fit_one_at_a_time_fail_together() -> None:
    check = checkpoint.check_fit(FITS, 4)
    assert check.status is CheckStatus.FAILS
    assert "give --workers 3" in check.advice


def test_weights_that_are_still_to_come_need_time_and_room() -> None:
    missing = replace(FITS, absent=("model.safetensors",), file_bytes=0)
    assert checkpoint.check_checkpoint("a/b", missing).status is CheckStatus.SLOW
    assert checkpoint.check_disk(Path("/m"), missing, 2 * GIB).status is CheckStatus.FAILS
    assert checkpoint.check_disk(Path("/m"), missing, 9 * GIB).status is CheckStatus.OK
    assert checkpoint.check_disk(Path("/m"), FITS, 0).status is CheckStatus.OK


def model(folder: Path, **changes: object) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_tokenizer_is_read_as_the_gateway_reads_it(tmp_path: Path) -> None:
    model(tmp_path)
    assert checkpoint.check_tokenizer(tmp_path, False).status is CheckStatus.NOTE
    (tmp_path / "tokenizer.json").write_text("{")
    assert checkpoint.check_tokenizer(tmp_path, False).status is CheckStatus.FAILS


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────

FREE = ("--port", "0", "--grpc-port", "0", "--scheduler-port", "0", "--cache-port", "0", "--metrics-port", "0")


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *FREE, *argv])
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in told["checks"]}
    assert told["status"] == max((c["status"] for c in checks.values()), key=list(CheckStatus).index)
    return status, checks


def test_the_demo_model_can_be_served_here(capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = doctor(capsys)
    assert status == 0
    assert {"Python", "cores", "memory", "torch", "FlashInfer", "checkpoint", "tokenizer"} <= checks.keys()
    assert checks["tokenizer"]["found"].endswith("with a chat template")


@pytest.mark.parametrize(
    ("changes", "flags", "name", "word"),
    [
        ({"intermediate_size": 2**40}, ["--load-format", "dummy"], "memory for the model", "does not fit into memory"),
        ({"architectures": ["FooModel"]}, [], "checkpoint", "architecture FooModel is not supported"),
        ({}, [], "checkpoint", "lacks model.safetensors"),
        ({}, ["--load-format", "dummy", "--max-model-len", "65"], "checkpoint", "max_model_len 65 is more than"),
    ],
)
def test_a_model_that_a_worker_refuses_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    flags: list[str],
    name: str,
    word: str,
) -> None:
    status, checks = doctor(capsys, "--model", str(model(tmp_path, **changes)), *flags)
    assert (status, checks[name]["status"]) == (1, "fails")
    assert word in checks[name]["advice"]


def test_a_table_has_a_line_per_check_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *FREE, "--model", "/nope"]) == 1
    out, err = capsys.readouterr()
    assert "there is no folder /nope" in " ".join(out.split())
    assert out.endswith("`paceline up` cannot serve like this; the lines marked fails say why.\n")
    assert err == ""


def test_without_torch_doctor_says_how_to_install_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gpu_worker.inspection", None)
    monkeypatch.delattr("gpu_worker.inspection", raising=False)
    status, checks = doctor(capsys)
    assert (status, checks["torch"]["status"]) == (1, "fails")
    assert "pip install" in checks["torch"]["advice"]
    assert "checkpoint" not in checks
