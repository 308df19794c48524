"""Makes a model that is ready to run: device, weights, KV pool, attention."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import structlog
import torch
from llguidance import LLTokenizer

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.flashinfer import FlashInferAttention, load_flashinfer, unsupported
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.decode_attention import WIDTH
from gpu_worker.cpu.int8 import Int8Matmul, can_multiply_int8, packed_int8
from gpu_worker.cpu.kernels import Int8Kernels, Kernels, compile_kernels
from gpu_worker.cpu.layers.all_layers import compile_layers, cpu_layers
from gpu_worker.cpu.matmul import PackedMatmul, check_threads, packing
from gpu_worker.cpu.numbers import KERNEL_TYPES
from gpu_worker.cpu.ops import CpuOps, largest_logits
from gpu_worker.cpu.products import FewRows
from gpu_worker.cpu.threads import sleep_between_steps
from gpu_worker.cpu.vectors import has_vectors
from gpu_worker.errors import ModelError
from gpu_worker.fits import block_bytes, check_fits, cpu_blocks, head_copy_bytes, memory_need
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.kv.swap import staging_bytes
from gpu_worker.memory import bytes_for_steps, kv_blocks_that_fit
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.embedding import EmbeddingConfig
from gpu_worker.models.flashinfer_ops import FlashInferOps
from gpu_worker.models.int8 import type_name
from gpu_worker.models.loader import LoadedModel, Progress, load_model
from gpu_worker.models.matmul import Matmul, PlainMatmul, TiledMatmul, check_matmul
from gpu_worker.models.ops import LayerOps, TorchOps
from gpu_worker.models.weights import Pack
from gpu_worker.sampling.fused import try_kernels
from gpu_worker.sampling.grammars import load_tokenizer
from gpu_worker.sampling.sampler import Largest
from gpu_worker.settings import CPU_STEP_TOKENS, GPU_STEP_TOKENS, WorkerSettings
from gpu_worker.steps.graphs import CaptureProgress, CudaCapture, graph_sizes
from gpu_worker.steps.inputs import HostInputs, PinnedInputs
from gpu_worker.steps.pieces import piece_sizes
from gpu_worker.steps.pooling import Pooler
from gpu_worker.steps.runner import ModelRunner
from gpu_worker.steps.slots import SlotLimits
from paceline.v1.common_pb2 import ModelInfo
from services.runtime.logs import get_logger
from services.runtime.model.identity import TOKENIZER
from services.runtime.processes import default_threads, whole_cores

log: structlog.stdlib.BoundLogger = get_logger(__name__)

# Vectors in one StepResult. Half of the message limit (services/runtime/rpc.py).
MAX_RESULT_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A runner that is ready for plans, and what it tells the scheduler about its model."""

    runner: ModelRunner
    info: ModelInfo


def build_worker(
    settings: WorkerSettings, progress: Progress | None = None, capture_progress: CaptureProgress | None = None
) -> BuiltWorker:
    """Build the worker. This reads the weights, and may take minutes. Raises ModelError for a model that cannot be
    served (ModelTooLarge if it does not fit into memory), and DeviceError if the KV pool cannot be allocated."""
    device = pick_device(settings.device)
    check_quantization(settings, device)

    def prepare(config: DecoderConfig, dtype: torch.dtype) -> None:
        check_fits(settings, config, dtype, device)
        if device.type == "cpu":
            weights_bytes = memory_need(settings, config, dtype).weights_bytes
            torch.set_num_threads(settings.threads or default_threads(weights_bytes, settings.local_workers))
            check_threads()

    model = load_model(
        settings.model,
        load_format=settings.load_format,
        dtype=settings.dtype,
        pooling=settings.pooling,
        device=device,
        seed=settings.seed,
        progress=progress,
        check=prepare,
        pack_for=lambda dtype: pack_for(settings, device, dtype),
        quantized_embedding=settings.quantization != "none",
    )
    if settings.deterministic:
        layer = model.weights.layers[0]
        matrices = [layer.qkv, layer.output, layer.gate_up, layer.down]
        if model.config.has_head:
            matrices.append(model.weights.head)
        check_matmul(matmul_for(settings, device, model.dtype), matrices, model.weights.final_norm)
    max_model_len = longest_sequence(settings, model.config, model.embedding)
    check_vectors(settings, model.config, model.embedding, device)
    flashinfer = _flashinfer(settings, model, device)
    if flashinfer is None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans once per shape, and most steps have a new shape
    fused_sampling = device.type == "cuda" and _can_fuse_sampling(model, device)
    make = _RunnerMaker(settings, model, device, max_model_len, flashinfer, _grammar_tokenizer(model), fused_sampling)
    runner = make.runner(settings.num_blocks or make.num_blocks(), _num_host_blocks(settings, model))
    make.log_piece_limits()
    if make.graph_sizes or make.piece_sizes:
        capture = CudaCapture()
        if make.graph_sizes:
            runner.capture_graphs(make.graph_sizes, capture, capture_progress)
        if make.piece_sizes:
            runner.capture_pieces(make.piece_sizes, capture, capture_progress)
    return BuiltWorker(runner, _model_info(model, max_model_len, settings.quantization))


def _flashinfer(settings: WorkerSettings, model: LoadedModel, device: torch.device) -> ModuleType | None:
    """The flashinfer module. None: the layers run on the compiled kernels for CPUs or on plain torch. Raises ModelError
    if the settings ask for flashinfer, and it cannot be used."""
    if settings.deterministic and settings.attention_backend == "flashinfer":
        raise ModelError("deterministic: attention_backend flashinfer is not supported; use torch")
    is_cpu = settings.attention_backend == "auto" and device.type == "cpu"
    if settings.deterministic or settings.attention_backend == "torch" or is_cpu:
        return None
    reason = unsupported(model.config.head_dim, model.dtype, device)
    if reason is None:
        try:
            return load_flashinfer()
        except ImportError as error:
            reason = f"it cannot be imported: {error}"
    if settings.attention_backend == "flashinfer":
        raise ModelError(f"attention_backend flashinfer cannot serve {model.name}: {reason}")
    log.warning("the layers run on plain torch instead of flashinfer", model=model.name, reason=reason)
    return None


def _can_fuse_sampling(model: LoadedModel, device: torch.device) -> bool:
    if model.embedding is not None:
        return False
    reason = try_kernels(model.config.vocab_size, model.dtype, device)
    if reason is not None:
        log.warning("sampling runs on plain torch instead of Triton kernels", model=model.name, reason=reason)
    return reason is None


def _grammar_tokenizer(model: LoadedModel) -> LLTokenizer | None:
    """The tokenizer for grammars; None: requests with a grammar fail on this worker."""
    if model.embedding is not None:
        return None
    try:
        return load_tokenizer(model.folder / TOKENIZER, model.config.vocab_size, model.config.eos_token_ids)
    except ModelError as error:
        log.warning("structured outputs are not possible", model=model.name, reason=str(error))
        return None


@dataclass(frozen=True, slots=True)
class _RunnerMaker:
    settings: WorkerSettings
    model: LoadedModel
    device: torch.device
    max_model_len: int
    flashinfer: ModuleType | None
    tokenizer: LLTokenizer | None
    fused_sampling: bool

    @property
    def max_batched_tokens(self) -> int:
        return step_tokens(self.settings, self.device)

    @property
    def graph_sizes(self) -> list[int]:
        if self.flashinfer is None or self.model.embedding is not None:  # graphs contain only decodes
            return []
        settings = self.settings
        return graph_sizes(min(settings.graph_max_seqs, settings.max_num_seqs, self.max_batched_tokens))

    @property
    def piece_sizes(self) -> list[int]:
        if self.flashinfer is None or self.model.embedding is not None:
            return []
        return piece_sizes(min(self.settings.graph_max_tokens, self.max_batched_tokens))

    def log_piece_limits(self) -> None:
        """Log that graph_max_tokens has no effect, or less than it says."""
        asked, most = self.settings.graph_max_tokens, self.max_batched_tokens
        if asked and not self.piece_sizes:
            reason = "an embedding model has no graphs"
            if self.flashinfer is None:
                reason = "the layers do not run on flashinfer"
            log.warning("graph_max_tokens is ignored", model=self.model.name, reason=reason)
        elif asked > most:
            log.warning("graph_max_tokens is limited to max_batched_tokens", asked=asked, max_batched_tokens=most)

    def num_blocks(self) -> int:
        """As many as fit `gpu_memory_utilization` (on a CPU: `kv_cache_gib`), but not more than all slots can use."""
        settings = self.settings
        if self.device.type == "cuda":
            one_block_bytes = block_bytes(settings, self.model.config, self.model.dtype)
            usable = settings.max_num_seqs * -(-self.max_model_len // settings.block_size)
            torch.cuda.empty_cache()
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            layers = self.model.config.num_layers
            needed_bytes = bytes_for_steps(
                lambda: self.runner(1, 0), self.graph_sizes, self.device, self.piece_sizes, layers
            )
            needed_bytes += staging_bytes(_num_host_blocks(settings, self.model), one_block_bytes)
            fit = kv_blocks_that_fit(
                total_bytes, free_bytes, needed_bytes, settings.gpu_memory_utilization, one_block_bytes
            )
            return min(fit, usable)
        return cpu_blocks(settings, self.model.config, self.model.dtype, self.max_model_len)

    def runner(self, num_blocks: int, num_host_blocks: int) -> ModelRunner:
        settings, config, device = self.settings, self.model.config, self.device
        pool = allocate_pool(
            num_blocks,
            settings.block_size,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            self.model.dtype,
            device,
            num_host_blocks,
        )
        limits = SlotLimits(
            max_num_seqs=settings.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            num_host_blocks=num_host_blocks,
        )
        table_blocks = -(-self.max_model_len // settings.block_size)
        largest: Largest | None = None
        attention: AttentionBackend
        ops: LayerOps
        if computes_at_once(settings, device, self.model.dtype) and torch.get_num_threads() > 1:
            sleep_between_steps()
        with ThreadPoolExecutor(min(2, whole_cores())) as starters:
            self._compile_kernels(starters)
            matmul, all_layers = matmul_for(settings, device, self.model.dtype), None
        has_spare_core = torch.get_num_threads() * settings.local_workers < whole_cores()
        if self.flashinfer is None and uses_kernels(settings, device, self.model.dtype):
            kernels = Kernels(self.model.dtype, torch.get_num_threads(), **self._kernel_options)
            attention = CpuAttention(pool, config.windows, kernels, by_row=settings.deterministic)
            ops = CpuOps(config, self.max_model_len, kernels)
            largest = partial(largest_logits, kernels)
            if isinstance(matmul, PackedMatmul) and has_few_rows(settings, device, self.model.dtype):
                threads = torch.get_num_threads()
                takes_both = whole_cores() == 2 and not has_spare_core
                with_bounds = head_copy_bytes(settings, config, self.model.dtype) > 0
                all_layers = cpu_layers(
                    config, self.model.weights, pool, attention, ops, matmul, threads, takes_both, with_bounds
                )
        elif self.flashinfer is None:
            attention = TorchAttention(pool, config.windows, by_row=settings.deterministic)
            ops = TorchOps(config, self.max_model_len, device)
        else:
            attention = FlashInferAttention(
                self.flashinfer, pool, config.windows, config.num_heads, self.max_batched_tokens
            )
            ops = FlashInferOps(self.flashinfer, config, self.max_model_len, device)
        decoder = Decoder(config, self.model.weights, attention, ops, matmul, all_layers)
        inputs = HostInputs() if device.type == "cpu" else PinnedInputs(limits, table_blocks, device)
        pooler = None
        if (embedding := self.model.embedding) is not None:
            pooler = Pooler(embedding, config.hidden_size, settings.max_num_seqs, device)
        return ModelRunner(
            decoder,
            attention,
            pool,
            limits,
            inputs,
            device,
            self.tokenizer,
            pooler,
            self.fused_sampling,
            largest,
            leaves_core=lambda rows: has_spare_core or (all_layers is not None and all_layers.leaves_core(rows)),
        )

    @property
    def _kernel_options(self) -> dict[str, bool]:
        wide_heads = self.model.config.head_dim % WIDTH == 0 and has_vectors(self.model.dtype)
        return {"by_size": not self.settings.deterministic, "wide_heads": wide_heads}

    def _compile_kernels(self, starters: Executor) -> None:
        """Start child processes that compile the kernels for CPUs that the cache lacks: up to two minutes of CPU time.
        If a child fails, its set is tried again where it is needed, alone: together they may need too much memory."""
        settings, dtype = self.settings, self.model.dtype
        if self.flashinfer is None and uses_kernels(settings, self.device, dtype):
            starters.submit(compile_kernels, dtype, torch.get_num_threads(), **self._kernel_options)
            if computes_at_once(settings, self.device, dtype) and not self.model.config.output_bias:
                starters.submit(compile_layers, dtype)


def check_quantization(settings: WorkerSettings, device: torch.device) -> None:
    """Raises ModelError if a worker with these settings cannot quantize its weights."""
    if settings.quantization == "none":
        return
    if device.type != "cpu":
        raise ModelError(f"quantization {settings.quantization} is for CPUs; this worker's device is {device.type}")
    if not can_multiply_int8():
        raise ModelError(f"quantization {settings.quantization} needs a CPU with AVX-512 VNNI")
    if settings.dtype == "float16":
        raise ModelError(f"quantization {settings.quantization} is not supported for float16; use bfloat16 or float32")


def pack_for(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> Pack | None:
    if settings.quantization == "int8":
        return packed_int8
    return None if settings.deterministic else packing(device, dtype, few_rows=has_few_rows(settings, device, dtype))


def matmul_for(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> Matmul[Any]:
    """For the matrices that pack_for() makes, and rows of this type."""
    if settings.quantization == "int8":
        return Int8Matmul(Int8Kernels(dtype, torch.get_num_threads(), by_size=not settings.deterministic))
    if settings.deterministic:
        return TiledMatmul()
    if device.type != "cpu":
        return PlainMatmul()
    few_rows = has_few_rows(settings, device, dtype)
    return PackedMatmul(FewRows(dtype, torch.get_num_threads()) if few_rows else None)


def computes_at_once(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether most models compute a step in one call (cpu/layers)."""
    is_plain = settings.quantization == "none" and not settings.deterministic
    return is_plain and has_few_rows(settings, device, dtype)


def has_few_rows(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels compute the products of a few rows."""
    return uses_kernels(settings, device, dtype) and has_vectors(dtype)


def uses_kernels(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the layers run on the compiled kernels for CPUs."""
    return device.type == "cpu" and settings.attention_backend == "auto" and dtype in KERNEL_TYPES


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def longest_sequence(settings: WorkerSettings, config: DecoderConfig, embedding: EmbeddingConfig | None) -> int:
    """Prompt and output tokens of one sequence. Raises ModelError if the settings ask for more than the model has."""
    positions = config.max_positions
    longest = positions
    if embedding is not None and embedding.max_tokens is not None:
        longest = min(positions, embedding.max_tokens)
    asked = settings.max_model_len or longest
    if asked > positions:
        raise ModelError(f"max_model_len {asked} is more than the model's {positions} positions")
    return asked


def step_tokens(settings: WorkerSettings, device: torch.device) -> int:
    """The most tokens of a step."""
    if settings.max_batched_tokens:
        return settings.max_batched_tokens
    # Half of the step is left for prompts when every slot decodes.
    return max(CPU_STEP_TOKENS, 2 * settings.max_num_seqs) if device.type == "cpu" else GPU_STEP_TOKENS


def check_vectors(
    settings: WorkerSettings, config: DecoderConfig, embedding: EmbeddingConfig | None, device: torch.device
) -> None:
    """Raises ModelError if the vectors of one step could exceed MAX_RESULT_BYTES."""
    if embedding is None:
        return
    vector_bytes = 4 * config.hidden_size
    most = MAX_RESULT_BYTES // vector_bytes
    if min(settings.max_num_seqs, step_tokens(settings, device)) > most:
        raise ModelError(
            f"max_num_seqs {settings.max_num_seqs} is too large for vectors of {vector_bytes} bytes: a step's result "
            f"can carry at most {most}; lower max_num_seqs or max_batched_tokens to that"
        )


def _num_host_blocks(settings: WorkerSettings, model: LoadedModel) -> int:
    if settings.num_host_blocks is not None:
        return settings.num_host_blocks
    return int(settings.host_gib * 2**30) // block_bytes(settings, model.config, model.dtype)


def _model_info(model: LoadedModel, max_model_len: int, quantization: str) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.config.architecture,
        dtype=type_name(model.dtype, quantization),
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.config.eos_token_ids,
        config_fingerprint=model.identity.config,
        tokenizer_fingerprint=model.identity.tokenizer,
        weights_fingerprint=model.identity.weights,
        embedding=None if model.embedding is None else model.embedding.info(model.config.hidden_size),
    )
