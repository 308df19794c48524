"""Input items of a response, in one plain form, and the chat messages that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.engine.list_limits import MAX_MESSAGES, MAX_PARTS
from services.gateway.errors import invalid

Item = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")


class InputShape(BaseModel):
    """What `input_items` accepts, for /openapi.json. Other fields (ids, states, annotations) are dropped."""

    model_config = ConfigDict(extra="allow")


class InputText(InputShape):
    """A part of a message or of an output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputRefusal(InputShape):
    """A part of an answer that refuses. The model reads it as text."""

    type: Literal["refusal"]
    refusal: str


class InputReasoningText(InputShape):
    """A part of reasoning."""

    type: Literal["reasoning_text", "input_text", "output_text", "text"]
    text: str


class InputMessage(InputShape):
    """A message to the assistant."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user"]
    content: str | list[InputText]


class InputAnswer(InputShape):
    """A message of the assistant."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | list[InputText | InputRefusal]


class InputCall(InputShape):
    """A call that the assistant has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(InputShape):
    """What the call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class InputReasoning(InputShape):
    """What the assistant thought, as an answer had it."""

    type: Literal["reasoning"]
    content: str | list[InputReasoningText] | None = None


InputItem = InputMessage | InputAnswer | InputCall | InputCallOutput | InputReasoning


def input_items(value: Any) -> list[Item]:
    """The items of the field `input` in their plain form. Raises ApiError 400 that names the item at fault.

    A text is the message of a user. Fields that no chat template reads (ids, states, annotations) are dropped.
    """
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list) or not value:
        raise invalid("input", "input: must be a text or a list of items that is not empty", code="invalid_type")
    if len(value) > MAX_MESSAGES:
        raise invalid("input", f"input has {len(value)} items; at most {MAX_MESSAGES} are possible")
    items = [_item(item, f"input.{index}") for index, item in enumerate(value)]
    if (num_parts := sum(len(item.get("content", ())) for item in items)) > MAX_PARTS:
        raise invalid("input", f"input: the items have {num_parts} parts; at most {MAX_PARTS} are possible")
    return items


def _item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        raise invalid(where, f"{where}: must be an object", code="invalid_type")
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise invalid(f"{where}.role", f"{where}.role: must be one of {', '.join(_ROLES)}")
            return _message(role, _parts(item.get("content"), f"{where}.content", role))
        case "function_call":
            return {
                "type": "function_call",
                "call_id": _text(item, "call_id", where),
                "name": _text(item, "name", where),
                "arguments": _text(item, "arguments", where),
            }
        case "function_call_output":
            output = item.get("output")
            parts = _parts(output, f"{where}.output", "user")
            text = "\n".join(part["text"] for part in parts)
            return {"type": "function_call_output", "call_id": _text(item, "call_id", where), "output": text}
        case "reasoning":
            content = item.get("content") or []
            return {"type": "reasoning", "content": _parts(content, f"{where}.content", "reasoning")}
        case kind:
            message = f"{where}.type: items of type {str(kind)[:40]!r} are not supported"
            raise invalid(f"{where}.type", message, code="unsupported_value")


def _message(role: str, parts: list[Item]) -> Item:
    return {"type": "message", "role": role, "content": parts}


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"{where}.{name}: must be a string", code="invalid_type")
    return value


def _parts(value: Any, where: str, role: str) -> list[Item]:
    """The text parts of a content."""
    kind = {"assistant": "output_text", "reasoning": "reasoning_text"}.get(role, "input_text")
    if isinstance(value, str):
        return [{"type": kind, "text": value}]
    if not isinstance(value, list):
        raise invalid(where, f"{where}: must be a string or a list of typed parts", code="invalid_type")
    parts = []
    for index, part in enumerate(value):
        match part:
            case {"type": str(given), "text": str(text)} if given in (*_TEXT_PARTS, kind):
                parts.append({"type": kind, "text": text})
            case {"type": "refusal", "refusal": str(text)} if role == "assistant":
                parts.append({"type": kind, "text": text})
            case {"type": str(given)}:
                at = f"{where}.{index}"
                raise invalid(at, f"{at}: a part of type {given[:40]!r} is not supported; this model takes text only")
            case _:
                raise invalid(f"{where}.{index}", f"{where}.{index}: must be an object with a type")
    return parts


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat of these items, as the messages of a chat completion.

    The instructions and the system messages that follow them become one message, because many templates take only one.
    Reasoning, text and calls in a row are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    system = [instructions] if instructions else []
    for item in items:
        if not messages and item.get("role") in ("system", "developer"):
            system.append(_joined(item))
            continue
        if not messages and system:
            messages.append({"role": "system", "content": "\n\n".join(system)})
            system = []
        _add(messages, item)
    if system:
        messages.append({"role": "system", "content": "\n\n".join(system)})
    return messages


def _joined(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"])


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    match item["type"]:
        case "message" if item["role"] == "assistant":
            turn = _assistant(messages, has=("content", "tool_calls"))
            turn["content"] = _joined(item)
        case "message":
            messages.append({"role": item["role"], "content": _joined(item)})
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn = _assistant(messages)
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        case "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        case "reasoning" if item["content"]:
            _assistant(messages, has=("content", "tool_calls", "reasoning"))["reasoning"] = _joined(item)


def _assistant(messages: list[dict[str, Any]], has: Sequence[str] = ()) -> dict[str, Any]:
    """The assistant's message that the item belongs to: the last message, if it is the assistant's and has none of the
    fields `has`, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not any(last.get(name) for name in has):
        return last
    messages.append({"role": "assistant", "content": None})
    return messages[-1]
