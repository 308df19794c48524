"""Requests of Anthropic's Messages API as clients send them. A field that would change the answer and is not served is
refused by name; docs/anthropic.md has the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.request_fields import METADATA, SAMPLING
from services.gateway.engine.list_limits import MAX_PARTS, check_lengths
from services.gateway.engine.request import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from services.gateway.errors import ApiError, invalid
from services.gateway.fields.closed import ClosedPart
from services.gateway.fields.numbers import Integer, as_api_error
from services.gateway.fields.other_servers import describe_unserved, refuse_unserved
from services.gateway.fields.tools import check_name, check_parameters
from services.gateway.openai.schema import ChatRequest

MAX_CACHE_MARKS = 4  # Anthropic's limit
# Fields that are served as in /v1/chat/completions. Anthropic's API has only temperature, top_p and top_k of them.
PASSED_ON = frozenset(SAMPLING | METADATA) | {"seed"}
# Fields that are not served, with the values that change nothing (null is always such a value).
REFUSED: dict[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
# The error code that Anthropic's client expects for `thread`: its tool runner then sends the whole history each time.
_THREADS_UNSUPPORTED = "thread_unsupported_request"
# Fields that change nothing here, whatever their value, and why.
IGNORED: dict[str, str] = {
    "context_management": "Anthropic shortens long prompts by it; here a prompt that is too long gets a 400",
    "diagnostics": "asks why a prompt was not cached; the answer's usage says how much was",
    "fallback_credit_token": "is about Anthropic's bill",
    "fallbacks": "other models for requests that a model declines by policy; no model here declines requests",
    "service_tier": "names Anthropic's capacity; `priority` is this server's field",
    "user_profile_id": "attributes a request to a party at Anthropic",
    "cache_control.scope": "Claude Code sends it; `cache_salt` says here which requests share their cache",
    "messages.content.citations": "point into documents, which are refused",
    "messages.content.caller": "which of Anthropic's own tools made the call; these tools are refused",
    "messages.content.is_error": "no chat template has a place for it; the result's text tells the model",
    "messages.content.signature": "lets Anthropic verify its own reasoning",
    "messages.content.redacted_thinking": "only Anthropic can decrypt it",
    "output_config.task_budget": "a budget for a task of several requests; max_tokens limits each of them here",
    "thinking.block_binding": "is about reasoning that Anthropic has signed",
    "thinking.budget_tokens": "no limit of its own: reasoning counts towards max_tokens",
    "tools.eager_input_streaming": "arguments of calls are always streamed as they come",
}
_IGNORED_AT_TOP = {name: why for name, why in IGNORED.items() if "." not in name}
_NEUTRAL_IN_TOOLS: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
# The fields that a block of each type must have, and where it may be: messages of these roles, or a tool_result.
_BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("user", "assistant", "system", "tool_result")),
    "tool_use": (("id", "name", "input"), ("assistant",)),
    "tool_result": (("tool_use_id",), ("user",)),
    "thinking": (("thinking",), ("assistant",)),
    "redacted_thinking": ((), ("assistant",)),
}


def _ignored(path: str) -> Any:
    """A field that is accepted and not read."""
    return Field(None, description=f"Ignored: {IGNORED[path]}.")


class _OpenPart(BaseModel):
    """Its unknown fields are accepted: clients send back as history what other servers answered."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class CacheControl(ClosedPart):
    """Ends a part of the prompt that the client wants cached, for `ttl` after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: str | None = _ignored("cache_control.scope")


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else [] if value is None else value


def _describe_types(schema: dict[str, Any]) -> None:
    """In the JSON Schema of a block: the types, and the fields that each of them needs."""
    properties = schema["properties"]
    schema["anyOf"] = [
        {
            "properties": {"type": {"const": kind}}
            | {name: {"type": "object" if name == "input" else "string"} for name in needed},
            "required": list(needed),
        }
        for kind, (needed, _) in _BLOCKS.items()
    ]
    properties["type"]["enum"] = list(_BLOCKS)


class Block(_OpenPart):
    """A content block. A field that belongs to another block type must be valid and is ignored. Only a tool_result may
    have a `content` that is not empty."""

    model_config = ConfigDict(json_schema_extra=_describe_types)

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Annotated[list[Block], BeforeValidator(_blocks, json_schema_input_type=Any)] = []
    thinking: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Block:
        if self.type not in _BLOCKS:
            raise ValueError(f"has the type {self.type[:40]!r}, which is not supported: this server reads text only")
        for name in _BLOCKS[self.type][0]:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is required in a block of type {self.type!r}")
        _check_holder(self.content, self.type)
        return self

    @property
    def mark(self) -> CacheControl | None:
        """Its own cache_control, or that of a block inside it."""
        inner = [block.cache_control for block in self.content if block.cache_control is not None]
        return self.cache_control or (inner[-1] if inner else None)


def _check_holder(blocks: list[Block], holder: str) -> None:
    for block in blocks:
        if holder not in _BLOCKS[block.type][1]:
            raise ValueError(f"has a block of type {block.type!r}, which is not possible in {holder!r}")


Blocks = Annotated[list[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Block] | None)]


def _describe_roles(schema: dict[str, Any]) -> None:
    """In the JSON Schema of a turn: which blocks a turn of each role may have."""
    schema["anyOf"] = []
    for role in ("user", "assistant", "system"):
        kinds = [kind for kind, (_, holders) in _BLOCKS.items() if role in holders]
        blocks = {"type": "array", "items": {"properties": {"type": {"enum": kinds}}}}
        content = {"anyOf": [{"type": ["string", "null"]}, blocks]}
        schema["anyOf"].append({"properties": {"role": {"const": role}, "content": content}})


class Message(_OpenPart):
    """One turn."""

    model_config = ConfigDict(json_schema_extra=_describe_roles)

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Message:
        _check_holder(self.content, self.role)
        return self


class MessageTool(ClosedPart):
    """A function that the model may call. `input_schema`: a JSON Schema of an object."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = _ignored("tools.eager_input_streaming")
    # `_refuse` checks these.
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any] | None, Field(max_length=0)] = None

    _check_name = field_validator("name")(check_name)
    _check_schema = field_validator("input_schema")(check_parameters)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if (kind := value.get("type")) not in (None, "custom"):
                raise ValueError(f"has the type {str(kind)[:40]!r}; only tools of the client are served (custom)")
            for name, neutral in _NEUTRAL_IN_TOOLS.items():
                if value.get(name) is not None and value[name] not in neutral:
                    raise ValueError(f"{name} is not supported (leave it out)")
            if value.get("input_schema") is None:
                raise ValueError("input_schema is required")
        return value


class CallChoice(ClosedPart):
    """Whether the answer may or must call a tool, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> CallChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("name is required with the type 'tool'")
        return self


class Thinking(ClosedPart):
    """Whether the model shall reason before it answers, and whether the client sees that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = _ignored("thinking.budget_tokens")
    block_binding: dict[str, Any] | None = _ignored("thinking.block_binding")
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        """The answer has thinking blocks."""
        return self.type != "disabled" and self.display != "omitted"


class OutputFormat(ClosedPart):
    """A JSON Schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClosedPart):
    """How hard the model shall think, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = _ignored("output_config.task_budget")


class Metadata(ClosedPart):
    """`user_id` stands for a tenant, as OpenAI's `user`."""

    user_id: str | None = None


class Mark(NamedTuple):
    """A cache_control, and the block that has it. `message`: -2 for the tools, -1 for the system prompt."""

    message: int
    block: int
    ttl: Literal["5m", "1h"]


def _describe_unserved(schema: dict[str, Any]) -> None:
    passed_on = ChatRequest.model_json_schema()["properties"]
    schema["properties"] |= {name: passed_on[name] for name in sorted(PASSED_ON)}
    describe_unserved(schema, refused=REFUSED, ignored=_IGNORED_AT_TOP, renamed={})


class MessagesRequest(BaseModel):
    """The body of POST /v1/messages, and of POST /v1/messages/count_tokens, which needs no `max_tokens`."""

    model_config = ConfigDict(
        strict=True, extra="ignore", hide_input_in_errors=True, json_schema_extra=_describe_unserved
    )

    model: str
    messages: list[Message] = Field(json_schema_extra={"minItems": 1})
    max_tokens: Integer | None = None
    system: Blocks = []
    tools: list[MessageTool] | None = None
    tool_choice: CallChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None

    @field_validator("system")
    @classmethod
    def _check_system(cls, value: list[Block]) -> list[Block]:
        _check_holder(value, "system")
        return value

    @field_validator("stop_sequences")
    @classmethod
    def _check_stop(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"has {len(value)} texts; at most {MAX_STOP_STRINGS} are possible")
        if any(not 1 <= len(text) <= MAX_STOP_STRING_CHARS for text in value or ()):
            raise ValueError(f"a stop sequence has 1 to {MAX_STOP_STRING_CHARS} characters")
        return value

    def marks(self) -> list[Mark]:
        """The breakpoints of the cache, in the order of the prompt."""
        marks = [
            Mark(message, block, control.ttl)
            for message, block, control in self._blocks_in_order()
            if control is not None
        ]
        if self.cache_control is not None:
            *_, (message, block, _) = self._blocks_in_order()
            marks.append(Mark(message, block, self.cache_control.ttl))
        return marks

    def _blocks_in_order(self) -> Iterator[tuple[int, int, CacheControl | None]]:
        yield from ((-2, i, tool.cache_control) for i, tool in enumerate(self.tools or ()))
        yield from ((-1, i, block.mark) for i, block in enumerate(self.system))
        for index, message in enumerate(self.messages):
            yield from ((index, i, block.mark) for i, block in enumerate(message.content))


def read_request(body: Any, max_model_len: int) -> MessagesRequest:
    """The request in a decoded JSON body. Raises ApiError 400 that names the unsupported fields, or else the wrong
    ones (up to 10)."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    _check_sizes(body, max_model_len)
    _refuse_unserved(body)
    try:
        request = MessagesRequest.model_validate(body)
    except ValidationError as error:
        raise as_api_error(error) from None
    if not any(message.content for message in request.messages):
        raise invalid("messages", "messages must not be empty")
    _check_tools(request)
    _check_last(request)
    _check_marks(request.marks())
    return request.model_copy(update={"messages": _merged(request.messages)})


def _merged(messages: list[Message]) -> list[Message]:
    """Turns of one role that follow each other become one turn, as at Anthropic. Many templates refuse such turns."""
    merged: list[Message] = []
    for _, same_role in groupby(messages, key=lambda message: message.role):
        first, *more = same_role
        content = [block for message in (first, *more) for block in message.content]
        merged.append(first.model_copy(update={"content": content}) if more else first)
    return merged


def _check_sizes(body: Mapping[str, Any], max_model_len: int) -> None:
    check_lengths(body, max_model_len)
    num_parts = 0
    holders = [message for message in _list(body, "messages") if isinstance(message, dict)]
    for holder in [{"content": body.get("system")}, *holders]:
        blocks = _list(holder, "content")
        num_parts += len(blocks) + sum(len(_list(block, "content")) for block in blocks if isinstance(block, dict))
    if num_parts > MAX_PARTS:
        raise invalid("messages", f"messages: the contents have {num_parts} blocks; at most {MAX_PARTS} are possible")


def _list(holder: Mapping[str, Any], name: str) -> list[Any]:
    value = holder.get(name)
    return value if isinstance(value, list) else []


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    try:
        refuse_unserved(_SERVED, body, refused=REFUSED, ignored=_IGNORED_AT_TOP, renamed={})
    except ApiError as error:
        code = error.code if body.get("thread") is None else _THREADS_UNSUPPORTED
        raise invalid(error.param, error.message, code=code) from None


_SERVED = frozenset(MessagesRequest.model_fields) | PASSED_ON


def _check_tools(request: MessagesRequest) -> None:
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        if tool.name in names:
            raise invalid(
                f"tools.{index}.name", f"tools.{index}.name: {tool.name!r} is the name of an earlier tool, too"
            )
        names.add(tool.name)
    choice = request.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not names:
        raise invalid("tool_choice", f"tool_choice {choice.type!r} is only possible with tools")
    if choice is not None and choice.type == "tool" and choice.name not in names:
        message = f"tool_choice.name: the tool {str(choice.name)[:128]!r} is not in tools"
        raise invalid("tool_choice.name", message)


def _check_last(request: MessagesRequest) -> None:
    """A last message of the assistant is continued, so it must have text and no tool calls."""
    last = request.messages[-1]
    if last.role != "assistant":
        return
    where = f"messages.{len(request.messages) - 1}"
    if any(block.type == "tool_use" for block in last.content):
        raise invalid(where, f"{where} calls tools: a message with their tool_result must follow")
    if not any(block.text and block.text.strip() for block in last.content):
        raise invalid(where, f"{where}: the last message is the assistant's and has no text to continue")


def _check_marks(marks: list[Mark]) -> None:
    if len(marks) > MAX_CACHE_MARKS:
        message = f"cache_control: {len(marks)} blocks have it; at most {MAX_CACHE_MARKS} are possible"
        raise invalid("cache_control", message)
    ttls = [mark.ttl for mark in marks]
    if ttls != sorted(ttls):  # "1h" before "5m"
        message = "cache_control: a block with ttl '1h' comes behind one with '5m' (order: tools, system, messages)"
        raise invalid("cache_control", message)
