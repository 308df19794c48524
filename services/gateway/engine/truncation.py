"""Prompts that a request allows to be cut: `truncate_prompt_tokens` and `truncation_side`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.gateway.errors import invalid

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep at most `num_tokens`. `side`: where tokens are cut off. None is "left", and the tokens that the tokenizer
    adds before a text (BOS) stay."""

    num_tokens: int
    side: Side | None = None

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokens that are kept."""
        if len(ids) <= self.num_tokens:
            return ids
        return ids[: self.num_tokens] if self.side == "right" else ids[-self.num_tokens :]


def make_truncation(num_tokens: int | None, side: Side | None, max_model_len: int) -> Truncation | None:
    """None if the request has no `truncate_prompt_tokens`; -1 keeps what leaves room for one output token. Raises
    ApiError 400."""
    name = "truncate_prompt_tokens"
    if num_tokens is None:
        if side is not None:
            raise invalid("truncation_side", f"truncation_side is only possible with {name}")
        return None
    if num_tokens == -1:
        return Truncation(max_model_len - 1, side)
    if not 1 <= num_tokens <= max_model_len:
        raise invalid(name, f"{name} must be -1, or between 1 and {max_model_len}, not {num_tokens}")
    return Truncation(num_tokens, side)
