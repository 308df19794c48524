"""The models that `make bench-gpu` measures, as config.json for `--load-format dummy`; bytes and FLOPs of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.weights import expected_tensors

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "dtype": "bfloat16",
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "dtype": "bfloat16",
    },
    # For tests of the bench itself.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "dtype": "float32",
    },
}


def write_checkpoint(shape: str, folder: Path) -> Path:
    """A folder that loads as dummy weights."""
    target = folder / shape
    target.mkdir()
    (target / "config.json").write_text(json.dumps(SHAPES[shape]))
    return target


def weight_bytes_per_step(config: DecoderConfig, element_bytes: int) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which a step reads only a few rows. An embedding
    that is also the head counts once."""
    elements = 0
    for name, shape in expected_tensors(config).items():
        if name != "model.embed_tokens.weight" or config.tie_embeddings:
            size = 1
            for width in shape:
                size *= width
            elements += size
    return elements * element_bytes


def decode_bytes(config: DecoderConfig, element_bytes: int, batch: int, context_tokens: int) -> int:
    """Bytes that one decode step reads, for `batch` sequences of `context_tokens` tokens each."""
    kv_bytes = batch * context_tokens * config.kv_elements_per_token * element_bytes
    return weight_bytes_per_step(config, element_bytes) + kv_bytes


def prefill_flops(config: DecoderConfig, prompts: list[int]) -> float:
    """Multiplications and additions of the matmuls and of causal attention. The head computes one row per prompt."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    matmuls = 2.0 * sum(prompts) * layer * config.num_layers
    attention = sum(2.0 * 2 * q_size * n * (n + 1) / 2 for n in prompts) * config.num_layers
    return matmuls + attention + 2.0 * len(prompts) * config.hidden_size * config.vocab_size
