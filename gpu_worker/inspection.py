"""Finds out what a worker would refuse, and what it would run on, without loading weights or claiming memory."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.attention.flashinfer import load_flashinfer, unsupported
from gpu_worker.build import check_quantization, check_vectors, longest_sequence, pick_device
from gpu_worker.fits import block_bytes, blocks_in, check_memory, memory_need, wanted_cpu_blocks
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.int8 import type_name
from gpu_worker.models.loader import open_checkpoint
from gpu_worker.settings import WorkerSettings
from services.runtime.memory import claims as memory_claims
from services.runtime.memory.available import AvailableMemory


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch of this Python. `cuda`: the CUDA version of its build; empty for a CPU build."""

    version: str
    cuda: str
    sees_gpu: bool
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    trouble: str = ""  # what torch says if it cannot use the GPU


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that a worker would serve."""

    folder: Path
    architecture: str
    dtype: str
    device: str
    makes_embeddings: bool
    max_model_len: int
    file_bytes: int  # weights in the files; 0 for dummy weights, and while files are absent
    absent: tuple[str, ...]  # weight files that are to be downloaded
    download_bytes: int  # of the weights; an estimate, as if the files had the served type without quantization
    weights_bytes: int  # in memory, in `dtype`; on a CPU with the copy of the head (head_copy_bytes())
    host_bytes: int  # memory of the host for a start with the smallest useful pool, at its peak
    available: AvailableMemory | None  # on the host
    wanted_pool_bytes: int  # of KV blocks on a CPU; 0 on a GPU
    pool_bytes: int  # the part of wanted_pool_bytes that fits
    no_flashinfer: str  # on a GPU: why FlashInfer cannot serve the model; empty if it can


def read_torch() -> TorchFacts:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sees_gpu = torch.cuda.is_available()
    trouble = " ".join(" ".join(str(warning.message).split()) for warning in caught)
    cuda = str(torch.version.cuda or "")
    if not sees_gpu:
        return TorchFacts(torch.__version__, cuda, False, trouble=trouble)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (properties.major, properties.minor)
    return TorchFacts(torch.__version__, cuda, True, properties.name, capability, properties.total_memory)


def import_flashinfer() -> str:
    """Why FlashInfer cannot be imported; empty if it can."""
    try:
        with contextlib.redirect_stdout(None):
            load_flashinfer()
    except Exception as error:  # it checks versions, and loads libraries
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _need(
    settings: WorkerSettings,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    available: AvailableMemory | None,
) -> tuple[int, int, int]:
    """Bytes of the weights without quantization, of the weights, and of the host's memory. Raises ModelTooLarge."""
    host = check_memory(settings, config, dtype, device, available)
    unquantized = settings.model_copy(update={"quantization": "none"})
    download, weights = (memory_need(one, config, dtype).weights_bytes for one in (unquantized, settings))
    return download, weights + host.head_copy_bytes, host.num_bytes


def inspect_model(settings: WorkerSettings) -> Inspection:
    """Raises ModelError for what build_worker() would refuse before it reads the weights' values, except the OpenMP
    settings of the worker's process."""
    device = pick_device(settings.device)
    check_quantization(settings, device)
    with memory_claims.lock() as claims:
        available = claims.available()
    needs: list[tuple[int, int, int]] = []
    opened = open_checkpoint(
        settings.model,
        load_format=settings.load_format,
        dtype=settings.dtype,
        pooling=settings.pooling,
        device=device,
        check=lambda config, dtype: needs.append(_need(settings, config, dtype, device, available)),
        fetch=False,
    )
    config, dtype = opened.config, opened.dtype
    max_model_len = longest_sequence(settings, config, opened.embedding)
    check_vectors(settings, config, opened.embedding, device)
    [(download_bytes, weights_bytes, host_bytes)] = needs
    wanted = fitting = 0
    if device.type == "cpu":
        one_block_bytes = block_bytes(settings, config, dtype)
        num_blocks = settings.num_blocks or wanted_cpu_blocks(settings, config, dtype, max_model_len)
        wanted = fitting = num_blocks * one_block_bytes
        if available is not None and settings.num_blocks is None:
            left = blocks_in(max(0, available.num_bytes - weights_bytes), one_block_bytes)
            fitting = min(num_blocks, left) * one_block_bytes
    return Inspection(
        folder=opened.folder,
        architecture=config.architecture,
        dtype=type_name(dtype, settings.quantization),
        device=device.type,
        makes_embeddings=opened.embedding is not None,
        max_model_len=max_model_len,
        file_bytes=opened.num_bytes,
        absent=opened.absent,
        download_bytes=download_bytes,
        weights_bytes=weights_bytes,
        host_bytes=host_bytes,
        available=available,
        wanted_pool_bytes=wanted,
        pool_bytes=fitting,
        no_flashinfer="" if device.type == "cpu" else unsupported(config.head_dim, dtype, device) or "",
    )
