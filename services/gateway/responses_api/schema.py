"""The request of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from services.gateway.errors import invalid
from services.gateway.fields.closed import ClosedPart
from services.gateway.fields.numbers import Flag, Integer
from services.gateway.openai.schema import PlainFields
from services.gateway.openai.values import Seed, Stop, Variables
from services.gateway.responses_api.items import InputItem, Item, input_items

# Fields of OpenAI that are not served, with the values that change nothing (null is always one).
REFUSED: dict[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "multi_agent": (),
    "prompt": (),
}
# Fields that change nothing here, whatever their value, and why.
IGNORED: dict[str, str] = {
    "max_tool_calls": "limits OpenAI's built-in tools, and this server has none",
    "prompt_cache_key": "the prefix cache finds a conversation by its tokens",
    "prompt_cache_options": "the prefix cache finds a conversation by its tokens",
    "prompt_cache_retention": "the prefix cache finds a conversation by its tokens",
    "safety_identifier": "names an end user for OpenAI's abuse detection",
    "service_tier": "there is only one tier; `priority` puts a request before others",
}
# The same for objects inside a request, by their paths.
IGNORED_INSIDE: dict[str, str] = {
    "reasoning.context": "the chat template decides which reasoning of earlier turns the model reads",
    "reasoning.generate_summary": "the older name of `reasoning.summary`",
    "reasoning.mode": "selects how OpenAI's models reason",
    "reasoning.summary": "no summaries are made",
    "stream_options.include_obfuscation": "adds random text for padding, and events here have none",
    "text.format.description": "describes the schema to a model; here templates get no schema",
    "text.format.name": "describes the schema to a model; here templates get no schema",
    "text.format.strict": "the output always follows the schema",
    "tools.allowed_callers": "is about OpenAI's programmatic tool calls; here the model calls every tool itself",
    "tools.defer_loading": "is about OpenAI's tool search; here the model reads every tool at once",
    "tools.output_schema": "templates read what a function takes, and not what it returns",
}
# What `include` may name. Only log probabilities have an effect; the others belong to features that are not served.
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
_MAX_METADATA, _MAX_NAME_CHARS, _MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's limits


def _ignored(path: str) -> Any:
    """A field that is accepted and not read."""
    return Field(None, description=f"Ignored: {IGNORED_INSIDE[path]}.")


class TextFormat(ClosedPart):
    """`text.format`: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = _ignored("text.format.name")
    description: str | None = _ignored("text.format.description")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = _ignored("text.format.strict")


class TextOptions(ClosedPart):
    """`text`. `verbosity` is for models that were trained for it; only its default is accepted."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(ClosedPart):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = _ignored("reasoning.summary")
    generate_summary: Literal["auto", "concise", "detailed"] | None = _ignored("reasoning.generate_summary")
    context: Literal["auto", "current_turn", "all_turns"] | None = _ignored("reasoning.context")
    mode: str | None = _ignored("reasoning.mode")


class ResponseStreamOptions(ClosedPart):
    """`stream_options`."""

    include_obfuscation: Flag | None = _ignored("stream_options.include_obfuscation")


class FunctionTool(ClosedPart):
    """A function, in the flat shape of this API. What its fields may hold is checked as a chat's tool."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = _ignored("tools.output_schema")
    defer_loading: bool | None = _ignored("tools.defer_loading")
    allowed_callers: list[str] | None = _ignored("tools.allowed_callers")


class NamedFunction(ClosedPart):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        return NamedFunction.model_validate(value)  # as in fields/tools.py
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


class ResponsesRequest(PlainFields):
    """POST /v1/responses: OpenAI's fields, and this server's fields of sampling and metadata."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED
    ignored: ClassVar[Mapping[str, str]] = IGNORED
    renamed: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    input: Annotated[
        list[Item],
        BeforeValidator(input_items, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    background: Flag | None = None
    store: Flag | None = None
    stream: Flag | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Integer | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Integer | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedFunction, BeforeValidator(_tool_choice)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    # Of this server.
    seed: Seed = None
    stop: Stop = Field([])
    min_tokens: Integer | None = None
    ignore_eos: Flag | None = None
    chat_template_kwargs: Variables | None = None

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is None:
            return None
        if len(value) > _MAX_METADATA:
            raise ValueError(f"has {len(value)} entries; at most {_MAX_METADATA} are possible")
        if any(len(name) > _MAX_NAME_CHARS or len(text) > _MAX_VALUE_CHARS for name, text in value.items()):
            raise ValueError(f"a name has at most {_MAX_NAME_CHARS} characters, and a value {_MAX_VALUE_CHARS}")
        return value

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        if unknown := [name for name in value or () if name not in _INCLUDES]:
            raise ValueError(f"has {unknown[0][:60]!r}, which is not known here")
        return value

    @property
    def is_stored(self) -> bool:
        """Whether the client wants the response to be stored. OpenAI's default is true."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the output has log probabilities."""
        return bool(self.include and LOGPROBS in self.include) or bool(self.top_logprobs)

    @classmethod
    def refuse_unserved(cls, body: Mapping[str, Any]) -> None:
        super().refuse_unserved(body)
        if body.get("background") and body.get("store") is False:
            raise invalid("store", "background needs `store` true, because its response is read from the store")
