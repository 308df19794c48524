"""Writes answers in Anthropic's shape: content blocks, usage and stop reasons; whole, or as events of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from paceline.v1 import common_pb2
from services.gateway.anthropic.retention import DURATIONS_MS
from services.gateway.engine.generation import Generation
from services.gateway.openai.format import Envelope
from services.gateway.openai.message import call_id
from services.gateway.parsing.delta import CallDelta, MessageDelta
from services.gateway.parsing.reply import ReplyFormat

# If a call's arguments are not a JSON object, `input` has their text under this key. Anthropic's guide to fine-grained
# tool streaming has the name.
INVALID_JSON = "INVALID_JSON"


def event(name: str, **fields: Any) -> bytes:
    """A server-sent event. Its data repeats its name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


PING = event("ping")


def usage(generation: Generation, num_output: int) -> dict[str, Any]:
    """Anthropic's usage. `input_tokens`: prompt tokens that were not read from the cache, and that `cache_control` does
    not keep for later requests. Until the scheduler has reported the counts of the cache, they are null, and
    `input_tokens` counts the whole prompt."""
    num_prompt, cached = len(generation.job.prompt_ids), generation.cached_tokens
    if cached is None:
        unknown = {"cache_read_input_tokens": None, "cache_creation_input_tokens": None, "cache_creation": None}
        return {"input_tokens": num_prompt, "output_tokens": num_output, **unknown}
    created = dict.fromkeys(DURATIONS_MS, 0)
    ttls = {duration_ms: ttl for ttl, duration_ms in DURATIONS_MS.items()}
    for kept in generation.job.metadata.cache_retention:
        created[ttls[kept.duration_ms]] += max(kept.end - max(kept.start, cached), 0)
    num_created = sum(created.values())
    return {
        "input_tokens": num_prompt - cached - num_created,
        "output_tokens": num_output,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": num_created,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": count for ttl, count in created.items()},
    }


def stop(generation: Generation, max_tokens: int, num_calls: int) -> dict[str, str | None]:
    """`stop_reason` and `stop_sequence`. `max_tokens`: what the request allows. The context may end before."""
    sequence = generation.stop_reason
    if generation.finish_reason != common_pb2.FINISH_REASON_STOP:
        reason = "max_tokens" if generation.job.sampling.max_tokens >= max_tokens else "model_context_window_exceeded"
    elif isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    else:
        reason = "tool_use" if num_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def message(
    envelope: Envelope, content: list[dict[str, Any]], ended: Mapping[str, str | None], used: dict[str, Any]
) -> dict[str, Any]:
    """A message, perhaps without content yet."""
    head = {"id": envelope.id, "type": "message", "role": "assistant", "model": envelope.model}
    return {**head, "content": content, **ended, "usage": used}


class ContentReader:
    """Reads an answer's text as content blocks."""

    def __init__(self, reply: ReplyFormat | None, answer_id: str) -> None:
        self._reply = reply
        self._parser = reply.parser() if reply is not None else None
        self._answer_id = answer_id

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._parser.num_calls if self._parser is not None else 0

    def read(self, text: str, *, is_last: bool) -> MessageDelta:
        """What the text adds."""
        if self._parser is None:
            return MessageDelta(content=text)
        return self._parser.push_last(text) if is_last else self._parser.push(text)

    def call_block(self, call: CallDelta) -> dict[str, Any]:
        """A block of a call, without its arguments."""
        assert self._reply is not None
        call_id_ = call_id(self._reply, self._answer_id, 0, call.index)
        return {"type": "tool_use", "id": call_id_, "name": call.name, "input": {}}

    def whole(self, text: str) -> list[dict[str, Any]]:
        """The content of a whole answer."""
        parsed = self.read(text, is_last=True)
        blocks: list[dict[str, Any]] = []
        if parsed.reasoning:
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content:
            blocks.append({"type": "text", "text": parsed.content, "citations": None})
        return blocks + [{**self.call_block(call), "input": _input(call.arguments)} for call in parsed.calls]


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


class BlockEvents:
    """Writes the events of content blocks, one block after the other."""

    def __init__(self, reader: ContentReader) -> None:
        self._reader = reader
        self._index = -1
        self._open = ""  # type of the block that is open

    def delta(self, text: str) -> bytes:
        """The events for this text; empty if it shows nothing yet."""
        return b"".join(self._events(self._reader.read(text, is_last=False)))

    def last(self, text: str) -> bytes:
        """The events for the rest of the text, and the end of the open block."""
        return b"".join([*self._events(self._reader.read(text, is_last=True)), *self._close()])

    def _events(self, delta: MessageDelta) -> list[bytes]:
        events: list[bytes] = []
        if delta.continued:  # must come first: the events for content close the call's block
            events.append(self._delta("input_json_delta", partial_json=delta.continued))
        if delta.reasoning:
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=delta.reasoning))
        if delta.content:
            events += self._begin("text", {"type": "text", "text": "", "citations": None})
            events.append(self._delta("text_delta", text=delta.content))
        for call in delta.calls:
            if call.name is None:
                continue
            events += [*self._close(), *self._begin("tool_use", self._reader.call_block(call))]
            if call.arguments:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._open == kind:
            return []
        closing = self._close()
        self._open = kind
        self._index += 1
        return [*closing, event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, kind: str, **fields: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [event("content_block_stop", index=self._index)]
