"""Checks of the machine without its GPU: Python, cores, memory, files, the processor's instructions, Docker."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from services.cli.doctor.check import Check, CheckStatus
from services.runtime.memory.available import GIB, AvailableMemory

# Gateway, scheduler, cache and worker each have a process, which runs beside the worker's threads.
COMFORTABLE_CORES = 4
# Each connection of a client is an open file.
COMFORTABLE_FILES = 4096
LITTLE_MEMORY_GIB = 2
DOCKER_S = 5.0


def check_python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    return Check("Python", CheckStatus.OK, found)


def check_cores(cores: int, quota: float | None, workers: int, threads: int, on_gpu: bool) -> Check:
    """`cores`: the number that this process may use. `quota`: the limit of its control group, in cores. `threads`: of
    torch in each worker; not used on a GPU."""
    usable = cores if quota is None else min(cores, quota)
    found = f"{cores}" if usable == cores else f"{usable:g} of {cores} (cgroup limit)"
    whole = max(1, int(usable))
    if not on_gpu and workers * threads > whole:
        remedy = f"give --threads {max(1, whole // workers if workers > 1 else whole - 1)}"
        if workers > whole:
            remedy = f"start at most {whole} worker(s), with --threads 1"
        advice = f"torch would start {workers * threads} threads, which then wait for each other: {remedy}"
        return Check("cores", CheckStatus.SLOW, found, advice)
    if usable < COMFORTABLE_CORES:
        advice = f"four services share {usable:g} core(s): {COMFORTABLE_CORES} or more are faster"
        return Check("cores", CheckStatus.SLOW, found, advice)
    return Check("cores", CheckStatus.OK, found)


def check_memory(available: AvailableMemory | None) -> Check:
    if available is None:
        return Check(
            "memory", CheckStatus.NOTE, "unknown", "this system has no /proc/meminfo: no model is refused for its size"
        )
    found = f"{available.num_bytes / GIB:.1f} GiB available ({available.limit})"
    if available.num_bytes < LITTLE_MEMORY_GIB * GIB:
        return Check(
            "memory", CheckStatus.SLOW, found, "little is left for KV: few requests run at a time, others wait"
        )
    return Check("memory", CheckStatus.OK, found)


def check_instructions(architecture: str, flags: frozenset[str], dtype: str, on_gpu: bool) -> Check:
    """The processor's vector and bf16 instructions. `flags`: those of /proc/cpuinfo. `dtype`: the type in which a CPU
    worker computes."""
    name = "CPU instructions"
    is_x86 = architecture in ("x86_64", "AMD64")
    if not flags or not (is_x86 or architecture == "aarch64"):
        return Check(name, CheckStatus.OK, f"{architecture}, unknown")
    vectors = ("avx2", "avx512f") if is_x86 else ("asimd", "sve")
    has_bf16 = bool(flags & ({"avx512_bf16", "amx_bf16"} if is_x86 else {"bf16"}))
    shown = [flag for flag in (*vectors, "avx512_bf16", "amx_bf16", "bf16") if flag in flags]
    found = f"{architecture}: {', '.join(shown) or 'no vectors that torch uses'}"
    if on_gpu:
        return Check(name, CheckStatus.OK, found)
    if dtype in ("bfloat16", "float16") and not (has_bf16 and dtype == "bfloat16"):
        advice = f"no instructions for {dtype}: it saves memory, but matmul is slower than with --dtype float32"
        return Check(name, CheckStatus.SLOW, found, advice)
    if is_x86 and "avx512f" not in flags:
        narrow = "256" if "avx2" in flags else "128"
        return Check(name, CheckStatus.SLOW, found, f"no AVX-512: matrix products use {narrow}-bit vectors")
    if not has_bf16:
        return Check(
            name, CheckStatus.NOTE, found, "no bf16 instructions: --dtype bfloat16 would be slower than float32"
        )
    return Check(name, CheckStatus.OK, found)


def check_open_files(hard_limit: int | None) -> Check:
    """`hard_limit`: services raise their limit to it. None: any number."""
    if hard_limit is None or hard_limit >= COMFORTABLE_FILES:
        return Check("open files", CheckStatus.OK, "any number" if hard_limit is None else f"up to {hard_limit}")
    advice = f"at most about {hard_limit} connections: raise the hard limit (ulimit -Hn, or LimitNOFILE of systemd)"
    return Check("open files", CheckStatus.SLOW, f"up to {hard_limit}", advice)


def check_docker(version: str | None, trouble: str = "") -> Check:
    """Docker is optional. `version`: that of Docker's server; None if there is none."""
    if version:
        return Check("Docker (optional)", CheckStatus.OK, version)
    return Check("Docker (optional)", CheckStatus.NOTE, trouble or "not installed", "only `docker compose up` needs it")


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Of the first processor; empty if unknown."""
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(values.split())
    except OSError:
        pass
    return frozenset()


def hard_file_limit() -> int | None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def docker_version() -> tuple[str | None, str]:
    """The version of Docker's server, or why there is none."""
    if shutil.which("docker") is None:
        return None, ""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"does not answer ({type(error).__name__})"
    return (done.stdout.strip() or None), "installed, but its server does not answer"
