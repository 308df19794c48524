"""Small random checkpoints of every family we serve, made by transformers, and the output of transformers for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers

VOCAB = 199
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Far from uniform logits, so that rounding decides nothing.
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(name: str) -> transformers.PreTrainedConfig:
    match name:
        case "llama-tied":
            return transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True)
        case "llama3-rope":
            return transformers.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE)
        case "mistral":
            return transformers.MistralConfig(**_SIZES, sliding_window=24)
        case "qwen2":
            return transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True)
        case "qwen3":
            return transformers.Qwen3Config(**_SIZES, head_dim=32)
        case "llama-wide":  # heads for which the CPU has a kernel for chunks
            return transformers.LlamaConfig(**_SIZES, head_dim=64)
        case _:
            raise ValueError(name)


FAMILIES = ("llama-tied", "llama3-rope", "mistral", "qwen2", "qwen3", "llama-wide")
_SHARDED = {"llama3-rope", "qwen3"}
_BF16 = {"mistral", "qwen3"}


@dataclass
class Reference:
    """A checkpoint on disk, and transformers' greedy continuation of a prompt (kept: it is slow)."""

    folder: Path
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @cached_property
    def model(self) -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        key = (new_tokens, *prompt)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            mask = torch.ones_like(ids)
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]


def make_checkpoint(name: str, folder: Path) -> Reference:
    torch.manual_seed(FAMILIES.index(name))
    model = transformers.AutoModelForCausalLM.from_config(_config(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norm weights and biases start as ones and zeros, which would hide a mix-up.
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), parameter_name
    if name in _BF16:
        model = model.bfloat16()
    model.save_pretrained(folder, max_shard_size="100KB" if name in _SHARDED else "5GB")
    return Reference(folder)
