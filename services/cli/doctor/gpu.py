"""Checks of torch, the NVIDIA driver, the GPU and FlashInfer."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.doctor.check import Check, CheckStatus
from services.runtime.memory.available import GIB

if TYPE_CHECKING:
    from gpu_worker.inspection import TorchFacts

NVIDIA_SMI_S = 20.0
# The first GPUs with bfloat16 matmul (Ampere).
BF16_CAPABILITY = (8, 0)
FLASHINFER = "flashinfer-python"
# Packages with compiled kernels. FlashInfer cannot be imported if their version differs from its own.
KERNEL_PACKAGES = ("flashinfer-cubin", "flashinfer-jit-cache")
INSTALL_GPU = "pip install -e '.[gpu]'"


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver. `gpus`: name and memory of each GPU, as nvidia-smi shows them."""

    version: str
    gpus: tuple[str, ...]


def check_torch(torch: TorchFacts | None, why: str, driver: Driver | None) -> Check:
    """`torch`: None if it cannot be imported, because of `why`."""
    if torch is None:
        advice = f"`up` cannot start a worker: `make up` installs torch, and so does pip install -e '.[worker]' ({why})"
        return Check("torch", CheckStatus.FAILS, "cannot be imported", advice)
    found = f"{torch.version} ({f'CUDA {torch.cuda}' if torch.cuda else 'CPU build'})"
    if driver is not None and not torch.cuda:
        remedy = ".venv/bin/pip uninstall -y torch && rm .venv/serve.stamp && make up TORCH=pip"
        advice = f"this build cannot use the GPU: {remedy}"
        return Check("torch", CheckStatus.SLOW, found, advice)
    if driver is not None and not torch.sees_gpu:
        advice = f"torch cannot use the GPU: {torch.trouble or 'is the driver older than its CUDA version?'}"
        return Check("torch", CheckStatus.SLOW, found, advice)
    return Check("torch", CheckStatus.OK, found)


def check_gpu(torch: TorchFacts | None, driver: Driver | None) -> Check:
    if driver is None and (torch is None or not torch.sees_gpu):
        advice = "the model runs on the CPU: for development and small models"
        return Check("NVIDIA GPU", CheckStatus.SLOW, "none", advice)
    if torch is None or not torch.sees_gpu:
        assert driver is not None
        found = f"driver {driver.version}: {', '.join(driver.gpus)}"
        return Check("NVIDIA GPU", CheckStatus.SLOW, found, "torch does not use it: see the line above")
    major, minor = torch.capability
    version = f", driver {driver.version}" if driver is not None else ""
    found = f"{torch.gpu}, {torch.total_bytes / GIB:.0f} GiB, compute capability {major}.{minor}{version}"
    if torch.capability < BF16_CAPABILITY:
        return Check(
            "NVIDIA GPU", CheckStatus.SLOW, found, "no bfloat16 matmul before capability 8.0: try --dtype float16"
        )
    return Check("NVIDIA GPU", CheckStatus.OK, found)


def check_flashinfer(versions: dict[str, str], needed: str, sees_gpu: bool, why_not: str) -> Check:
    """`versions`: those of FlashInfer's installed packages. `why_not`: why FlashInfer cannot be imported, or why it
    cannot serve the model."""
    version = versions.get(FLASHINFER)
    found = version or "not installed"
    if not sees_gpu:
        return Check("FlashInfer", CheckStatus.OK, f"{found}; not used without a GPU")
    if version is None:
        return Check("FlashInfer", CheckStatus.SLOW, found, f"the layers run on plain torch: {INSTALL_GPU}")
    if _numbers(version) < _numbers(needed):
        advice = f"{needed} or newer is needed: {INSTALL_GPU}"
        return Check("FlashInfer", CheckStatus.FAILS, found, advice)
    for name in KERNEL_PACKAGES:
        if (other := versions.get(name)) is not None and _numbers(other) != _numbers(version):
            advice = f"{name} {other} is of another version: pip install {name}=={version}, or uninstall it"
            return Check("FlashInfer", CheckStatus.FAILS, found, advice)
    if why_not:
        return Check("FlashInfer", CheckStatus.SLOW, found, f"the layers run on plain torch: {why_not}")
    return Check("FlashInfer", CheckStatus.OK, found)


def flashinfer_versions() -> dict[str, str]:
    versions = {}
    for name in (FLASHINFER, *KERNEL_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def needed_flashinfer() -> str:
    """The least version of FlashInfer that Paceline's installed metadata require; "0" if they are not installed or name
    none."""
    try:
        requirements = importlib.metadata.requires("paceline") or []
    except importlib.metadata.PackageNotFoundError:
        return "0"
    found = [match[1] for line in requirements if (match := re.match(rf"{FLASHINFER}\s*>=\s*([\d.]+)", line))]
    return found[0] if found else "0"


def read_driver(root: Path = Path("/")) -> Driver | None:
    """None if there is no driver, or no GPU."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if tool is not None:
        command = [tool, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0 and (rows := _rows(done.stdout)):
            return Driver(rows[0][0], tuple(f"{name} ({memory})" for _, name, memory in rows))
    # A container may have the driver's files without the tool.
    try:
        gpus = [path.name for path in (root / "proc/driver/nvidia/gpus").iterdir()]
        version = re.search(r"\s(\d+\.\d+[.\d]*)\s", (root / "proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return Driver(version[1] if version else "unknown", tuple(gpus)) if gpus else None


def _rows(text: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == 3]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
