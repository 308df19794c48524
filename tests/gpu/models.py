"""Small models that FlashInfer can serve, and workers for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.build import build_worker
from gpu_worker.settings import WorkerSettings
from gpu_worker.steps.runner import ModelRunner

VOCAB = 499
# Head size 64; logits far from uniform, so that rounding decides little.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": 40}),
    # Seven query heads for a KV head; a window in the upper layers only.
    "qwen2-mixed-windows": (
        "Qwen2Config",
        {
            "hidden_size": 448,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 64, "tie_word_embeddings": True}),
}
# bf16 against fp32 arithmetic on the same bf16 weights. Where the tokens differ, the reference's logit of our token may
# be below its best logit by at most this share of the range of its logits.
BF16_TOLERANCE = 0.04


@dataclass
class Checkpoint:
    folder: Path
    model: Any  # transformers', in float32

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab] on the CPU."""
        return self.model(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        return out[0, len(prompt) :].tolist()


def make_checkpoint(family: str, folder: Path) -> Checkpoint:
    """Random weights that are exact in bf16."""
    transformers = pytest.importorskip("transformers")
    name, changes = FAMILIES[family]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.bfloat16().save_pretrained(folder)
    # Read anew: bfloat16() has rounded the rotary frequencies as well.
    return Checkpoint(folder, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def gpu_runner(folder: Path, **settings: Any) -> ModelRunner:
    defaults = {
        "dtype": "bfloat16",
        "device": "cuda",
        "num_blocks": 1500,
        "max_num_seqs": 40,
        "max_batched_tokens": 512,
    }
    return build_worker(WorkerSettings(model=str(folder), **{**defaults, **settings})).runner


def check_near(checkpoint: Checkpoint, prompt: list[int], output: list[int]) -> int:
    """`output` is the reference's greedy continuation up to near ties; returns how many tokens are equal."""
    logits = checkpoint.logits([*prompt, *output])[len(prompt) - 1 : -1]
    ranges = logits.amax(-1) - logits.amin(-1)
    lacking = logits.amax(-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    # Our own tokens are the context of all the rows, so each row is judged for itself.
    assert (lacking <= BF16_TOLERANCE * ranges).all(), f"{(lacking / ranges).max():.3f} of the range of the logits"
    return int((lacking == 0).sum())
