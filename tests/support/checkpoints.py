"""Small random checkpoints of every family, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # wide enough that no two logits are near each other
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}


def make(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a random fp32 checkpoint of the family into `folder`; sharded for llama2."""
    import transformers

    name, changes = FAMILIES[family]
    config = getattr(transformers, name)(**COMMON | changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.save_pretrained(folder, max_shard_size="100KB" if family == "llama2" else "1GB")
    return folder


def fill(model: Any) -> None:
    """Randomise biases and norms: they start as zeros and ones, which would hide that they are not applied."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                shift = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(shift + 0.3 * torch.randn_like(parameter))
