"""Checks from config.json whether a model fits into memory, before any weight is downloaded or read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import structlog
import torch

from gpu_worker.cpu.layers.byte_products import has_byte_products
from gpu_worker.cpu.vectors import has_vectors
from gpu_worker.errors import ModelError, ModelTooLarge
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.int8 import type_name, weights_bytes
from gpu_worker.models.weights import expected_tensors
from gpu_worker.settings import GPU_STEP_TOKENS, WorkerSettings
from services.runtime.logs import get_logger
from services.runtime.memory import claims as memory_claims
from services.runtime.memory.available import GIB, AvailableMemory

log: structlog.stdlib.BoundLogger = get_logger(__name__)

# On a CPU, the pool takes at most this share of the available memory, unless the smallest useful pool needs more. The
# rest is for steps and other programs.
_POOL_SHARE = 0.9
# A head of less than one of so many weights has no copy.
_LEAST_HEAD = 10


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The least memory of a worker, in bytes."""

    weights_bytes: int
    # Beyond the weights while they load: twice the largest fused matrix, and the largest tensor of the source. With
    # int8: the larger of two fused matrices and the largest matrix that is not quantized, plus the largest int8 matrix
    # before it is packed.
    loading_bytes: int
    # All KV blocks, including the dummy block.
    pool_bytes: int
    head_copy_bytes: int = 0  # see head_copy_bytes()

    @property
    def num_bytes(self) -> int:
        """The peak. The pool and the copy of the head are allocated after the weights have loaded."""
        return self.weights_bytes + max(self.loading_bytes, self.head_copy_bytes + self.pool_bytes)


def check_fits(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelTooLarge if the weights and the smallest useful KV pool exceed the device's available memory.

    The host's memory is checked too. It holds everything on a CPU, and the blocks of --host-gib on a GPU. What fits is
    claimed, so that workers that start together do not count the same memory.
    """
    with memory_claims.lock() as claims:
        need = check_memory(settings, config, dtype, device, claims.available())
        claims.claim(need.num_bytes)


def check_memory(
    settings: WorkerSettings,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    available: AvailableMemory | None,
) -> MemoryNeed:
    """check_fits() without a claim. `available`: on the host. Returns what the host needs. Raises ModelTooLarge."""
    need = memory_need(settings, config, dtype)
    if device.type == "cuda":
        _check(settings, replace(need, head_copy_bytes=0), dtype, device, _gpu_memory(settings, device))
        need = MemoryNeed(0, 0, 0)
    need = replace(need, pool_bytes=need.pool_bytes + _host_pool_bytes(settings, config, dtype))
    _check(settings, need, dtype, device, available)
    return need


def cpu_blocks(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """The number of KV blocks on a CPU: the blocks that --kv-cache-gib holds, but at most what all slots use at full
    length. If the memory beside the weights holds fewer, the pool is cut to these, but not below the smallest useful
    pool. Claims the pool's memory: the system provides it only when sequences fill the blocks, so another worker would
    still see it as free.

    Raises ModelError if not even one block fits into --kv-cache-gib."""
    one_block_bytes, copy_bytes = block_bytes(settings, config, dtype), head_copy_bytes(settings, config, dtype)
    num_blocks = wanted_cpu_blocks(settings, config, dtype, max_model_len)
    with memory_claims.lock() as claims:
        available = claims.available()
        fitting = num_blocks
        if available is not None:
            fitting = blocks_in(max(0, available.num_bytes - copy_bytes), one_block_bytes)
        if available is not None and fitting < num_blocks:
            smallest = memory_need(settings, config, dtype).pool_bytes // one_block_bytes
            num_blocks = min(num_blocks, max(fitting, smallest))
            log.warning(
                "the KV pool is smaller than kv_cache_gib, for lack of memory",
                kv_cache_gib=settings.kv_cache_gib,
                pool_gib=round(num_blocks * one_block_bytes / GIB, 3),
                available_gib=round(available.num_bytes / GIB, 3),
                limit=available.limit,
            )
        claims.claim(copy_bytes + num_blocks * one_block_bytes)
    return num_blocks


def wanted_cpu_blocks(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """The number of KV blocks that --kv-cache-gib holds, but at most what all slots use at full length. Raises
    ModelError if not even one block fits into --kv-cache-gib."""
    one_block_bytes = block_bytes(settings, config, dtype)
    wanted = int(settings.kv_cache_gib * GIB) // one_block_bytes
    if not wanted:
        raise ModelError(f"no room for a KV block of {one_block_bytes} bytes in {settings.kv_cache_gib:.3f} GiB")
    return min(wanted, settings.max_num_seqs * -(-max_model_len // settings.block_size))


def blocks_in(num_bytes: int, one_block_bytes: int) -> int:
    """The largest number of KV blocks that a worker allocates if `num_bytes` of memory are available."""
    return int(_POOL_SHARE * num_bytes) // one_block_bytes


def memory_need(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype) -> MemoryNeed:
    """What the model takes on its device. The smallest useful pool has --num-blocks blocks, if given. Otherwise it
    holds one sequence of --max-batched-tokens tokens (by default 2,048, on a CPU as well), or of the longest possible
    sequence if that is shorter."""
    shapes = expected_tensors(config)
    largest = max(map(math.prod, shapes.values()))
    fused = max(
        2 * config.intermediate_size * config.hidden_size,
        (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size,
    )
    # Dummy weights are drawn as float32. A checkpoint's tensors have their own type.
    source_type = torch.float32 if settings.load_format == "dummy" else getattr(torch, config.dtype, torch.float32)
    loading_bytes = 2 * fused * dtype.itemsize
    if settings.quantization == "int8":
        loading_bytes = max(loading_bytes, largest * dtype.itemsize) + max(fused, largest)
    num_blocks = settings.num_blocks
    if num_blocks is None:
        longest = min(settings.max_model_len or config.max_positions, settings.max_batched_tokens or GPU_STEP_TOKENS)
        num_blocks = -(-longest // settings.block_size)
    return MemoryNeed(
        weights_bytes=weights_bytes(shapes, config, dtype, settings.quantization),
        loading_bytes=loading_bytes + largest * source_type.itemsize,
        pool_bytes=(num_blocks + 1) * block_bytes(settings, config, dtype),
        head_copy_bytes=head_copy_bytes(settings, config, dtype),
    )


def head_copy_bytes(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype) -> int:
    """The int8 copy of the head on a CPU that computes a step in one call (cpu/layers/logit_bounds.py). 0: there is
    none, because the head is a small part of the weights, or because this CPU or these settings have no use for it. It
    is counted also for the few models that this call cannot compute."""
    has_layers = settings.attention_backend == "auto" and settings.quantization == "none" and not settings.deterministic
    if not (has_layers and config.has_head and has_vectors(dtype) and has_byte_products()):
        return 0
    shapes = expected_tensors(config)
    if config.vocab_size * config.hidden_size * _LEAST_HEAD < sum(map(math.prod, shapes.values())):
        return 0
    return config.vocab_size * (config.hidden_size + 8)  # with two float32 per token


def block_bytes(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one KV block, in all layers."""
    return config.kv_elements_per_token * settings.block_size * dtype.itemsize


def _host_pool_bytes(settings: WorkerSettings, config: DecoderConfig, dtype: torch.dtype) -> int:
    if settings.num_host_blocks is not None:
        return settings.num_host_blocks * block_bytes(settings, config, dtype)
    return int(settings.host_gib * GIB)


def _gpu_memory(settings: WorkerSettings, device: torch.device) -> AvailableMemory:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if settings.num_blocks is None:  # then the pool stays within the worker's share of the memory
        free_bytes -= int(total_bytes * (1 - settings.gpu_memory_utilization))
    return AvailableMemory(max(0, free_bytes), f"a GPU of {total_bytes / GIB:.1f} GiB")


def _check(
    settings: WorkerSettings,
    need: MemoryNeed,
    dtype: torch.dtype,
    device: torch.device,
    available: AvailableMemory | None,
) -> None:
    if available is None or need.num_bytes <= available.num_bytes:
        return
    served = type_name(dtype, settings.quantization)
    helps = ["a smaller model"] if need.weights_bytes else []
    if settings.quantization == "none" and need.weights_bytes:
        if dtype.itemsize > 2:
            helps.append(f"--dtype bfloat16 (weights of {need.weights_bytes * 2 / dtype.itemsize / GIB:.1f} GiB)")
        if device.type == "cpu":
            helps.append("--quantization int8")
    if settings.num_blocks is not None:
        helps.append(f"fewer than --num-blocks {settings.num_blocks}")
    if settings.host_gib or settings.num_host_blocks:
        helps.append("less --host-gib")
    weights, loading = need.weights_bytes / GIB, need.loading_bytes / GIB
    pool, copy = need.pool_bytes / GIB, need.head_copy_bytes / GIB
    beside = f" and {copy:.1f} GiB for a copy of the head" if need.head_copy_bytes else ""
    raise ModelTooLarge(
        f"{settings.model} does not fit into memory: it needs {need.num_bytes / GIB:.1f} GiB (weights as {served} "
        f"{weights:.1f} GiB; {loading:.1f} GiB more while they load, then {pool:.1f} GiB of KV blocks{beside}), but "
        f"{available.num_bytes / GIB:.1f} GiB are available ({available.limit}); what helps: "
        f"{', '.join([*helps, 'more memory'])}"
    )
