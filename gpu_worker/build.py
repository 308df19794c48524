"""From settings to a model that is ready to run: device, weights, KV pool, attention."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.errors import ModelError
from gpu_worker.inputs import HostInputs
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.loader import LoadedModel, Progress, load_model
from gpu_worker.models.ops import TorchOps
from gpu_worker.runner import ModelRunner
from gpu_worker.settings import WorkerSettings
from gpu_worker.slots import SlotLimits
from paceline.v1.common_pb2 import ModelInfo


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    runner: ModelRunner
    info: ModelInfo


def build_worker(settings: WorkerSettings, progress: Progress | None = None) -> BuiltWorker:
    """Takes as long as reading the weights. ModelError for a model that cannot be served, DeviceError for no memory."""
    device = pick_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) - 1))
    model = load_model(
        settings.model,
        load_format=settings.load_format,
        dtype=settings.dtype,
        device=device,
        seed=settings.seed,
        progress=progress,
    )
    max_model_len = _max_model_len(settings, model.config)
    num_blocks = settings.num_blocks or _num_blocks(settings, model, max_model_len, device)
    config = model.config
    num_host_blocks = _num_host_blocks(settings, model)
    pool = allocate_pool(
        num_blocks,
        settings.block_size,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        model.dtype,
        device,
        num_host_blocks,
    )
    attention = TorchAttention(pool, config.windows)
    limits = SlotLimits(
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        num_host_blocks=num_host_blocks,
    )
    decoder = Decoder(config, model.weights, attention, TorchOps(config, max_model_len, device))
    runner = ModelRunner(decoder, attention, pool, limits, HostInputs(), device)
    return BuiltWorker(runner, _model_info(model, max_model_len))


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


def _max_model_len(settings: WorkerSettings, config: DecoderConfig) -> int:
    asked = settings.max_model_len or config.max_positions
    if asked > config.max_positions:
        raise ModelError(f"max_model_len {asked} is more than the model's {config.max_positions} positions")
    return asked


def _num_blocks(settings: WorkerSettings, model: LoadedModel, max_model_len: int, device: torch.device) -> int:
    """What memory allows, but never more than all slots can use at full length."""
    block_bytes = _block_bytes(settings, model)
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        # A tenth of the device stays free for activations and the allocator's slack.
        memory_bytes = max(0, free_bytes - total_bytes // 10)
    else:
        memory_bytes = int(settings.kv_cache_gib * 2**30)
    usable = settings.max_num_seqs * -(-max_model_len // settings.block_size)
    num_blocks = min(memory_bytes // block_bytes, usable)
    if num_blocks < 1:
        raise ModelError(f"no room for a KV block of {block_bytes} bytes in {memory_bytes / 2**30:.3f} GiB")
    return int(num_blocks)


def _num_host_blocks(settings: WorkerSettings, model: LoadedModel) -> int:
    if settings.num_host_blocks is not None:
        return settings.num_host_blocks
    return int(settings.host_gib * 2**30) // _block_bytes(settings, model)


def _block_bytes(settings: WorkerSettings, model: LoadedModel) -> int:
    return model.config.kv_elements_per_token * settings.block_size * model.dtype.itemsize


def _model_info(model: LoadedModel, max_model_len: int) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.config.eos_token_ids,
    )
