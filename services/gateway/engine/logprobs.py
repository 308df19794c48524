"""Formats log probabilities as OpenAI and vLLM do."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.engine.scores import Score

TokenBytes = Callable[[int], bytes]
# JSON has no infinity. A token that a grammar rules out has this log probability, as in vLLM.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probability. `rank` is known only for prompt tokens."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]  # the most likely tokens at its position, best first
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that the answer repeats before its output.

    `offsets`: where its tokens begin in the text, in characters; empty: computed from the tokens.
    """

    text: str
    offsets: Sequence[int] = ()
    alone: bool = False  # the answer has no output; the one generated token is not shown


def scored(token_ids: Sequence[int], scores: Sequence[Score]) -> list[ScoredToken]:
    """Combine tokens with their scores."""
    return [
        ScoredToken(token, score.logprob, score.top, score.rank) for token, score in zip(token_ids, scores, strict=True)
    ]


def token_text(piece: bytes) -> str:
    """The text of a token. A part of a character is written as OpenAI writes it, so that different tokens differ."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class LogprobFormat:
    """Formats the log probabilities of one choice, piece by piece, for a chat or a completion."""

    def __init__(
        self, chat: bool, token_bytes: TokenBytes, shown_bytes: TokenBytes, offset: int = 0, *, as_ids: bool = False
    ) -> None:
        """`shown_bytes`: what a token adds to the text (a hidden special token adds nothing). `offset`: characters of
        the text before the first token. With `as_ids` a token is named `token_id:7`, and not by its text."""
        self._chat = chat
        self._as_ids = as_ids
        self._bytes = token_bytes
        self._shown_bytes = shown_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = offset  # characters so far

    def shape(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """The `logprobs` object for these tokens, which follow the tokens of the last call."""
        if self._chat:
            return {"content": [self._entry(token) for token in tokens], "refusal": None}
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprob, _LEAST_LOGPROB) for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [self._advance(token.token_id) for token in tokens],
        }

    def skip(self, token_ids: Sequence[int]) -> None:
        """Move past tokens that the client already has."""
        for token_id in token_ids:
            self._advance(token_id)

    def _entry(self, token: ScoredToken) -> dict[str, Any]:
        top = [self._named(other, logprob) for other, logprob in token.top]
        return {**self._named(token.token_id, token.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(self._bytes(token_id)),
        }

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_text(self._bytes(token_id))

    def _likeliest(self, token: ScoredToken) -> dict[str, float]:
        # As in OpenAI's API, the sampled token is always among them. It is the first one, as in vLLM.
        entries = [(token.token_id, token.logprob), *token.top]
        named: dict[str, float] = {}
        for other, logprob in entries:
            named.setdefault(self._name(other), max(logprob, _LEAST_LOGPROB))
        return named

    def _advance(self, token_id: int) -> int:
        """Where the token begins, in characters. A token that begins inside a character has that character's offset
        plus one."""
        offset = self.offset + bool(self._decoder.getstate()[0])
        self.offset += len(self._decoder.decode(self._shown_bytes(token_id)))
        return offset


def echoed_logprobs(shape: LogprobFormat, first: int, others: Sequence[ScoredToken], echo: Echo) -> dict[str, Any]:
    """The `logprobs` object of a prompt in a completion; null for the first token, which has no predecessor."""
    shaped = shape.shape([ScoredToken(first, 0.0, ()), *others])
    shaped["token_logprobs"][0] = shaped["top_logprobs"][0] = None
    # Some tokenizers drop the space of the first token from the text. Then the tokens have more characters.
    missing = max(0, shape.offset - len(echo.text))
    shaped["text_offset"] = echo.offsets or [max(0, offset - missing) for offset in shaped["text_offset"]]
    return shaped


def prompt_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token a map over the likeliest tokens and the token itself, by token id; null for
    the first token, which has no predecessor."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(token_bytes(token_id))}

    shaped: list[dict[str, Any] | None] = [None]
    for token in tokens:
        entries = {str(token.token_id): entry(token.token_id, token.logprob, token.rank)}
        for rank, (other, logprob) in enumerate(token.top, start=1):
            entries[str(other)] = entry(other, logprob, rank if other != token.token_id else token.rank)
        shaped.append(entries)
    return shaped
