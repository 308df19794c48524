"""Chat messages as clients send them, and the form in which chat templates read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from services.gateway.fields.other_servers import REFUSED_IN_MESSAGES


def _content(value: Any) -> Any:
    """Join typed parts with line breaks, as other servers do for templates that take a string."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of typed parts")
    texts = []
    for part in value:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "text"}:
                raise ValueError("has a text part without a string `text`")
            case {"type": str(kind)}:
                raise ValueError(f"has a part of type {kind[:40]!r}; this model takes text only")
            case _:
                raise ValueError("has a part that is no object with a `type`")
    return "\n".join(texts)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


def _arguments(value: Any) -> Any:
    """Checked here, because the errors of a union name its branches as if these were fields."""
    if not isinstance(value, str | dict):
        raise ValueError("must be a string or an object")
    return value


class CalledFunction(_Part):
    """The function of a tool call. `arguments`: JSON, as the model wrote it."""

    name: str
    arguments: Annotated[str | dict[str, Any], BeforeValidator(_arguments)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Templates take the arguments as an object. Text that is no JSON object is passed on unchanged: it is in the
        history, and to refuse it would end the conversation."""
        arguments: Any = self.arguments or {}
        if isinstance(arguments, str):
            try:
                decoded = json.loads(arguments)
            except (ValueError, RecursionError):
                decoded = None
            if isinstance(decoded, dict):
                arguments = decoded
        return {"name": self.name, "arguments": arguments}


class ToolCall(_Part):
    """A tool call of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call for a chat template."""
        call: dict[str, Any] = {"type": self.type, "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id, **call}


class TextPart(_Part):
    """A typed part of a content. Only /openapi.json uses this class; `_content` reads the parts."""

    type: Literal["text"]
    text: str


# In the JSON Schema of a message: only the assistant's content may be null, and only the assistant calls tools.
_BY_ROLE: dict[str, Any] = {
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"content": {"not": {"type": "null"}}, "tool_calls": {"enum": [None, []]}}},
    ]
}


class ChatMessage(_Part):
    """One turn of a chat. The assistant's content may be null, as in a turn that only calls tools."""

    model_config = ConfigDict(json_schema_extra=_BY_ROLE)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])] | None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in REFUSED_IN_MESSAGES:
                if value.get(name) not in (None, []):
                    raise ValueError(f"{name} is not supported in a message (leave it out, or null)")
        if isinstance(value, dict) and value.get("content") is None:
            if value.get("role") == "assistant":
                return {**value, "content": None}
            if "content" in value:
                # pydantic would accept null for any role. It refuses this object, with an error that names `content`.
                return {**value, "content": _NO_CONTENT}
        return value

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the assistant has tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template. `developer` is OpenAI's newer name for `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning if self.reasoning is not None else self.reasoning_content
        if self.role == "assistant" and reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
        return message


_NO_CONTENT = object()  # no type that a content may have
