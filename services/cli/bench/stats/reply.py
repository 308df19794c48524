"""Reads a streamed reply (server-sent events) piece by piece, each with its time of arrival."""

from __future__ import annotations

import json
from typing import Any

from services.cli.bench.stats.records import RequestRecord

# Fields of a chat's delta that are generated text. Some servers call the reasoning `reasoning_content`, others
# `reasoning`.
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class ReplyError(Exception):
    """The reply reports an error, or is no reply. The message is the reason, short and without details."""


class StreamedReply:
    """Fills a record from the lines of a reply."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.is_done = False
        self._pieces: list[str] = []
        self._num_pieces = 0
        self._last_s: float | None = None

    @property
    def text(self) -> str:
        """The visible text, without reasoning and tool calls."""
        return "".join(self._pieces)

    def feed(self, line: bytes, at_s: float) -> None:
        """One line of the reply. Raises ReplyError."""
        name, _, data = line.partition(b":")
        if name != b"data":  # a comment, an event's name, an empty line
            return
        data = data.strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ReplyError("bad stream: a chunk is not JSON") from None
        if not isinstance(chunk, dict):
            raise ReplyError("bad stream: a chunk is not an object")
        if chunk.get("error"):
            raise ReplyError(f"error in the stream: {error_code(chunk)}")
        if chunk.get("usage"):
            self._count(chunk["usage"])
        for choice in chunk.get("choices") or ():
            self._choice(choice, at_s)

    def end(self, at_s: float) -> None:
        """The reply has ended. Raises ReplyError if it lacks its end."""
        record = self.record
        if not (self.is_done or record.finish_reason):
            raise ReplyError("the stream ended early")
        if record.first_s is None:  # no text at all, as after an immediate end token
            record.first_s = record.end_s = record.end_s or at_s
        if not record.is_counted:
            record.output_tokens = self._num_pieces

    def _choice(self, choice: dict[str, Any], at_s: float) -> None:
        record = self.record
        if choice.get("finish_reason"):
            record.finish_reason = str(choice["finish_reason"])
            record.end_s = at_s
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if not (text or delta.get("tool_calls") or any(delta.get(name) for name in _TEXTS)):
            return
        self._num_pieces += 1
        self._pieces.append(text)
        if self._last_s is None:
            record.first_s = at_s
        else:
            record.gaps_s.append(at_s - self._last_s)
        self._last_s = record.end_s = at_s

    def _count(self, usage: dict[str, Any]) -> None:
        record = self.record
        if isinstance(usage.get("completion_tokens"), int):
            record.output_tokens, record.is_counted = usage["completion_tokens"], True
        if isinstance(usage.get("prompt_tokens"), int):
            record.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        if isinstance(details.get("cached_tokens"), int):
            record.cached_tokens = details["cached_tokens"]


def error_code(body: Any) -> str:
    """A short name of an error: OpenAI's code or type. Empty if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else body if isinstance(body, dict) else {}
    for name in ("code", "reason", "type"):
        if isinstance(error.get(name), str) and error[name]:
            return str(error[name])[:60]
    return ""
