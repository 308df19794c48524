"""Settings of a worker."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from demo import CHECKPOINT
from services.runtime.settings import AddressList, ServiceSettings

# One variable for every service that needs the model: the gateway its tokenizer, the worker its weights.
MODEL_ENV = "PACELINE_MODEL"
# Default tokens in one step. On a CPU, larger steps do not compute a prompt faster, because their activations do not
# fit into the caches. They also make every prompt of the step wait longer.
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048


class WorkerSettings(ServiceSettings, section="worker"):
    """A worker: the model's forward passes on a CPU or an NVIDIA GPU."""

    scheduler: AddressList = Field(
        "127.0.0.1:50051", description="host:port of the scheduler; with commas: of the leader and its standbys"
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port for health checks and reflection; 0 takes a free one")
    metrics_port: int = Field(
        9103,
        ge=0,
        le=65535,
        description="port of Prometheus /metrics; 0 takes a free one, and so does the default if it is in use",
    )
    name: str = Field("", description="the worker's name in logs; empty: host name and process id")

    model: str = Field(
        default_factory=lambda: os.environ.get(MODEL_ENV) or str(CHECKPOINT),
        description=f"folder of a Hugging Face checkpoint, or a hub name (default: {MODEL_ENV}, else the demo model)",
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights from config.json alone")
    seed: int = Field(0, ge=0, description="seed of the dummy weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, the checkpoint's type on a GPU"
    )
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: matrices as int8 with a scale per output channel, on a CPU (half the memory of bfloat16; "
        "tokens may differ)",
    )
    pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="serve embeddings with this pooling; auto: as the checkpoint's sentence-transformers files say; "
        "without these files, generate",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is a GPU")
    attention_backend: Literal["auto", "flashinfer", "torch"] = Field(
        "auto",
        description="kernels of the layers; auto: compiled kernels on a CPU, flashinfer on a GPU for the models that "
        "it can serve",
    )
    graph_max_seqs: int = Field(
        256, ge=0, description="decode steps of up to this many sequences replay CUDA graphs (flashinfer); 0: no graphs"
    )
    graph_max_tokens: int = Field(
        0,
        ge=0,
        description="largest step, in tokens, that replays CUDA graphs between its attention calls, if it has prompt "
        "chunks or more sequences than graph_max_seqs; 0: such steps run eagerly (flashinfer only; not for embedding "
        "models; at most max_batched_tokens; not tested on a GPU yet)",
    )
    deterministic: bool = Field(
        False,
        description="a token's probabilities depend only on the tokens before it, bit for bit, and not on the rest of "
        "the batch (slow: row by row)",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="threads of a worker on a CPU (default: cores - 1, at least 1; both of two cores for a model of 32 "
        "MiB or more); a CPU limit of the container counts as that many cores",
    )
    local_workers: int = Field(
        1,
        ge=1,
        description="workers on this machine (or in this container, if it has a CPU limit), which share its cores; "
        "used if threads are not given",
    )

    step_deadline_s: float = Field(
        60.0, gt=0, description="a step that takes longer counts as hung: the worker reports it and ends"
    )
    step_deadline_token_s: float = Field(
        0.1, ge=0, description="additional seconds for each prompt token of the step, and for each of max_num_seqs"
    )
    step_hang_s: float = Field(
        1.5,
        ge=0,
        description="once the worker knows its pace, a step counts as hung this many seconds after 10 times the "
        "slowest recent step; 0: no such limit",
    )
    first_step_deadline_s: float = Field(
        600.0, gt=0, description="seconds for the first step after a registration, which may compile kernels"
    )

    block_size: int = Field(16, ge=1, le=128, description="tokens in a KV block")
    num_blocks: int | None = Field(None, ge=1, description="usable KV blocks (default: as many as memory allows)")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory for weights, steps and KV, if num_blocks is not given"
    )
    kv_cache_gib: float = Field(1.0, gt=0, description="KV memory on a CPU, if num_blocks is not given")
    num_host_blocks: int | None = Field(None, ge=0, description="KV blocks in host memory (default: as host_gib says)")
    host_gib: float = Field(0.0, ge=0, description="host memory for preempted and evicted KV; 0: no host tier")
    max_num_seqs: int = Field(256, ge=1, le=16384, description="sequences that run at the same time")
    max_batched_tokens: int | None = Field(
        None,
        ge=1,
        description=f"tokens in one step (default: {GPU_STEP_TOKENS} on a GPU; {CPU_STEP_TOKENS} on a CPU, or twice "
        "max_num_seqs if that is more)",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="prompt and output tokens of one sequence (default: the model's limit)"
    )
