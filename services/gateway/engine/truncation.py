"""Prompts that a request allows to be cut: `truncate_prompt_tokens` and `truncation_side`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.gateway.errors import invalid

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep at most `num_tokens`. `side`: where tokens are cut off. None is "left". `keeps_added`: the tokens that the
    tokenizer adds to a text (BOS, EOS) stay."""

    num_tokens: int
    side: Side | None = None
    keeps_added: bool = True

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """The tokens that are kept."""
        if len(ids) <= self.num_tokens:
            return ids
        return ids[: self.num_tokens] if self.side == "right" else ids[-self.num_tokens :]


def make_truncation(
    num_tokens: int | None,
    side: Side | None,
    max_model_len: int,
    *,
    num_output: int = 1,
    keeps_added: bool | None = None,
) -> Truncation | None:
    """The truncation, or None if the request has no `truncate_prompt_tokens`. Raises ApiError 400.

    A `num_tokens` of -1 keeps `max_model_len - num_output` tokens. Without `keeps_added`, the added tokens stay only if
    the request has no `side`.
    """
    keeps = side is None if keeps_added is None else keeps_added
    name = "truncate_prompt_tokens"
    if num_tokens is None:
        if side is not None:
            raise invalid("truncation_side", f"truncation_side is only possible with {name}")
        return None
    if num_tokens == -1:
        return Truncation(max_model_len - num_output, side, keeps)
    if not 1 <= num_tokens <= max_model_len:
        raise invalid(name, f"{name} must be -1, or between 1 and {max_model_len}, not {num_tokens}")
    return Truncation(num_tokens, side, keeps)
