"""The tokenizer for a checkpoint without tokenizer files (only a config, random weights): token ids in and out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from services.gateway.errors import invalid
from services.gateway.text.chat_values import NO_EXTRAS, ChatExtras
from services.gateway.text.detokenizer import Detokenizer

_ADVICE = "this model has no tokenizer; send token ids"


class IdTokenizer:
    """Replaces `TextTokenizer`. It refuses text. Output is the token ids, each followed by a space."""

    longest_token_chars = 1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ApiError 400."""
        raise invalid("prompt", _ADVICE)

    def encode_part(
        self, text: str, num_tokens: int, *, cut_off: Literal["left", "right"] = "left", add_special_tokens: bool = True
    ) -> list[int]:
        """Raises ApiError 400."""
        raise invalid("prompt", _ADVICE)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        extras: ChatExtras = NO_EXTRAS,
    ) -> list[str]:
        """Raises ApiError 400."""
        raise invalid("messages", f"{_ADVICE} to /v1/completions")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        extras: ChatExtras = NO_EXTRAS,
    ) -> list[int]:
        """Raises ApiError 400."""
        raise invalid("messages", f"{_ADVICE} to /v1/completions")

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Raises ApiError 400."""
        raise invalid("messages", f"{_ADVICE} to /v1/completions")

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        return [str(token_id) for token_id in token_ids]

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ApiError 400."""
        raise invalid("prompt", _ADVICE)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return _numbers(token_ids)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        return _numbers([token_id]).encode()

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, with_markers: bool = False
    ) -> Detokenizer:
        return _IdDetokenizer()


class _IdDetokenizer:
    def push(self, token_ids: Iterable[int]) -> str:
        return _numbers(token_ids)

    def finish(self) -> str:
        return ""


def _numbers(token_ids: Iterable[int]) -> str:
    return "".join(f"{token} " for token in token_ids)
