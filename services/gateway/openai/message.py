"""The assistant's message of a chat's answer: reasoning, content and tool calls, whole or as deltas."""

from __future__ import annotations

import string
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import orjson

from paceline.v1 import common_pb2
from services.gateway.engine.sequence_run import FINISH_NAMES
from services.gateway.parsing.delta import MessageDelta
from services.gateway.parsing.reply import ReplyFormat

_LETTERS = string.ascii_letters + string.digits


def call_id(reply: ReplyFormat, answer_id: str, choice: int, index: int) -> str:
    """A call's id: the same at every gateway at which the answer has the same id."""
    assert reply.calls is not None
    number = int.from_bytes(sha256(f"{answer_id} {choice} {index}".encode()).digest())
    digits = []
    for _ in range(reply.calls.id_chars):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return reply.calls.id_prefix + "".join(digits)


class MessageWriter:
    """Turns the text of one choice into deltas in JSON."""

    def __init__(self, reply: ReplyFormat, answer_id: str, choice: int) -> None:
        self._reply = reply
        self._parser = reply.parser()
        self._answer_id = answer_id
        self._choice = choice

    def skip(self, text: str) -> None:
        """Parse text without giving its deltas: the client has them already."""
        self._parser.push(text)

    def delta(self, text: str) -> bytes:
        """The `delta` object for this text."""
        return orjson.dumps(self._shaped(self._parser.push(text)))

    def last_delta(self, text: str) -> bytes:
        """The `delta` object for the rest of the text."""
        return orjson.dumps(self._shaped(self._parser.push_last(text)))

    def finish_name(self, reason: common_pb2.FinishReason.ValueType) -> str:
        """The finish reason: `tool_calls` for an answer that has a call and ended by itself, unless the client has
        named the function."""
        return _finish_name(self._reply, self._parser.num_calls, reason)

    def _shaped(self, delta: MessageDelta) -> dict[str, Any]:
        shaped: dict[str, Any] = {}
        if delta.reasoning:
            shaped["reasoning"] = shaped["reasoning_content"] = delta.reasoning
        if delta.content:
            shaped["content"] = delta.content
        if delta.calls:
            shaped["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.name is None
                else {
                    "index": call.index,
                    "id": call_id(self._reply, self._answer_id, self._choice, call.index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in delta.calls
            ]
        return shaped


def _finish_name(reply: ReplyFormat, num_calls: int, reason: common_pb2.FinishReason.ValueType) -> str:
    calls = num_calls and not reply.is_named and reason == common_pb2.FINISH_REASON_STOP
    return "tool_calls" if calls else FINISH_NAMES[reason]


def whole_message(
    reply: ReplyFormat | None,
    text: str,
    reason: common_pb2.FinishReason.ValueType,
    *,
    echo: str,
    answer_id: str,
    choice: int,
) -> tuple[dict[str, Any], str]:
    """The message that shows the echo and then a whole text, and the finish reason."""
    message: dict[str, Any] = {"role": "assistant", "content": echo + text, "refusal": None}
    if reply is None:
        return message, FINISH_NAMES[reason]
    parser = reply.parser()
    parsed = parser.push_last(text)
    content = echo + parsed.content
    message["content"] = content if content or not (parsed.calls or parsed.reasoning) else None
    if reply.thinking is not None and reply.shows_reasoning:
        message["reasoning"] = message["reasoning_content"] = parsed.reasoning or None
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call_id(reply, answer_id, choice, call.index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
    return message, _finish_name(reply, parser.num_calls, reason)


def writers(replies: Sequence[ReplyFormat | None], answer_id: str) -> list[MessageWriter | None]:
    """A writer for each choice with a reply format."""
    return [None if reply is None else MessageWriter(reply, answer_id, i) for i, reply in enumerate(replies)]
