"""What transformers says: the reference for every token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
def tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@cache
def _generate(path: str, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool) -> tuple[int, ...]:
    model = load(path)
    inputs = torch.tensor([prompt])
    eos: Any = None if ignore_eos else model.generation_config.eos_token_id
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


def greedy(path: str | Path, prompt: list[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """The new tokens of a greedy fp32 run, end-of-sequence token included."""
    return list(_generate(str(path), tuple(prompt), max_tokens, ignore_eos))


def beam_search(path: str | Path, prompt: list[int], max_tokens: int, **options: Any) -> list[list[int]]:
    """The new tokens of the hypotheses of generate(num_beams=...), best first."""
    model = load(str(path))
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=-1,
            **options,
        )
    return [[token for token in row[len(prompt) :].tolist() if token >= 0] for row in output]


def processed(path: str | Path, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """The new tokens of a greedy run with options of generate(): penalties, bias, bad words, processors."""
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        output = load(str(path)).generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return list(output[0, len(prompt) :].tolist())


def logprobs(path: str | Path, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]: for each position, the log probabilities of the next token."""
    with torch.no_grad():
        logits: torch.Tensor = load(str(path))(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)
