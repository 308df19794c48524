"""Turns a request of the Messages API into a chat as `/v1/chat/completions` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from pydantic import PrivateAttr

from services.gateway.anthropic.schema import PASSED_ON, Block, Mark, MessagesRequest, MessageTool, read_request
from services.gateway.errors import invalid
from services.gateway.fields.messages import ChatMessage
from services.gateway.grammars.structure import Structure, from_schema
from services.gateway.openai import schema

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CachedPrefix(NamedTuple):
    """A part of the prompt that the client wants cached: a chat that begins like the request's chat. It consists of the
    first `num_whole` messages of the request's chat (a system prompt counts as a message), then of `rest`: the marked
    message, cut behind the mark."""

    num_whole: int
    rest: list[ChatMessage]
    ttl: str


class CountedChat(schema.ChatRequest):
    """POST /v1/messages/count_tokens."""

    output_schema: dict[str, Any] | None = None
    _prefixes: list[CachedPrefix] = PrivateAttr(default_factory=list)

    @classmethod
    def from_body(cls, body: Any, max_model_len: int) -> Self:
        """The chat of a decoded JSON body. Raises ApiError 400."""
        request = read_request(body, max_model_len)
        fields = _fields(request) | {name: body[name] for name in PASSED_ON & body.keys()}
        chat = schema.parse(cls, fields, max_model_len)
        chat._prefixes = _prefixes(request)
        return chat

    @property
    def prefixes(self) -> list[CachedPrefix]:
        """The parts of the prompt that the client wants cached: at most one for each ttl, the longer ttl first."""
        return self._prefixes

    def structure(self) -> Structure | None:
        if self.output_schema is None:
            return None
        return from_schema("output_config.format.schema", self.output_schema)


class MessageChat(CountedChat):
    """POST /v1/messages."""

    @classmethod
    def from_body(cls, body: Any, max_model_len: int) -> Self:
        chat = super().from_body(body, max_model_len)
        if chat.max_tokens is None:
            raise invalid("max_tokens", "max_tokens is required", code="missing_required_parameter")
        return chat


def _fields(request: MessagesRequest) -> dict[str, Any]:
    messages = [] if not request.system else [{"role": "system", "content": _text(request.system)}]
    for message in request.messages:
        messages += _chat_messages(message.role, message.content)
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "user": request.metadata.user_id if request.metadata is not None else None,
        "tools": [_tool(tool) for tool in request.tools or ()],
        "continue_final_message": request.messages[-1].role == "assistant",
    }
    if (choice := request.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = _CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking.type != "disabled"}
        fields["include_reasoning"] = request.thinking.is_shown
    if (config := request.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        fields["output_schema"] = config.format.schema_ if config.format is not None else None
    return fields


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _text(blocks: Sequence[Block]) -> str:
    """The text of all text blocks, joined with line breaks, as chats join their parts."""
    return "\n".join(block.text or "" for block in blocks if block.type == "text")


def _chat_messages(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A turn as chat messages: each tool_result is a message of its own, in the order of the blocks."""
    if role != "user":
        message: dict[str, Any] = {"role": role, "content": _text(blocks)}
        if thoughts := [block.thinking or "" for block in blocks if block.type == "thinking"]:
            message["reasoning"] = "\n".join(thoughts)
        if calls := [_call(block) for block in blocks if block.type == "tool_use"]:
            message["tool_calls"] = calls
        return [message]
    messages: list[dict[str, Any]] = []
    texts: list[Block] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block)
            continue
        if texts:
            messages.append({"role": "user", "content": _text(texts)})
            texts = []
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
    if texts or not messages:
        messages.append({"role": "user", "content": _text(texts)})
    return messages


def _call(block: Block) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _prefixes(request: MessagesRequest) -> list[CachedPrefix]:
    last_of_ttl = {mark.ttl: mark for mark in request.marks()}  # the last mark covers the earlier ones
    return [_prefix(request, mark) for mark in last_of_ttl.values()]


def _prefix(request: MessagesRequest, mark: Mark) -> CachedPrefix:
    num_system = 1 if request.system else 0
    if mark.message < 0:
        # Some templates write the tools into the first user message, and some refuse a chat without a user message.
        rest = [{"role": "user", "content": ""}]
        if mark.message == -1:
            return _checked(
                0, [{"role": "system", "content": _text(request.system[: mark.block + 1])}, *rest], mark.ttl
            )
        return _checked(num_system, rest, mark.ttl)
    before = [_chat_messages(message.role, message.content) for message in request.messages[: mark.message]]
    message = request.messages[mark.message]
    rest = _chat_messages(message.role, message.content[: mark.block + 1])
    return _checked(num_system + sum(map(len, before)), rest, mark.ttl)


def _checked(num_whole: int, rest: list[dict[str, Any]], ttl: str) -> CachedPrefix:
    return CachedPrefix(num_whole, [ChatMessage.model_validate(message) for message in rest], ttl)
