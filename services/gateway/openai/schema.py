"""The supported OpenAI requests. Types are strict, except for numbers that vLLM reads too ("8", 8.0). A field that is
not served is refused by name, or ignored on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from paceline.request_fields import METADATA, SAMPLING, MetadataField, SamplingParam
from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.list_limits import check_lengths
from services.gateway.engine.request import (
    GenerateJob,
    RequestBuilder,
    check_beam,
    check_metadata,
    check_samples,
    make_search,
    tenant_of_user,
)
from services.gateway.engine.sampling import SamplingChoices
from services.gateway.engine.truncation import Side, Truncation, make_truncation
from services.gateway.errors import ApiError, invalid
from services.gateway.fields.closed import ClosedPart
from services.gateway.fields.messages import ChatMessage
from services.gateway.fields.numbers import KINDS, Flag, Integer, Number, as_api_error
from services.gateway.fields.other_servers import (
    IGNORED,
    IGNORED_INSIDE,
    REFUSED,
    RENAMED,
    describe_unserved,
    refuse_unserved,
)
from services.gateway.fields.replies import ToolUse
from services.gateway.fields.template import TemplateInput, template_input
from services.gateway.fields.tools import NamedChoice, Tool, ToolChoice, check_tools
from services.gateway.grammars.structure import Structure
from services.gateway.openai.format import Shown
from services.gateway.openai.structured import ResponseFormat, StructuredOutputs
from services.gateway.openai.values import (
    BadWords,
    EarlyStopping,
    LogitBias,
    NoneAdded,
    NumLogprobs,
    Prompt,
    Seed,
    Stop,
    TokenIds,
    Uint32,
    Variables,
)
from services.gateway.text.chat_values import ChatExtras


def _describe_unserved(schema: dict[str, Any], cls: type[RequestBody]) -> None:
    describe_unserved(schema, refused=cls.refused, ignored=cls.ignored, renamed=cls.renamed)


class RequestBody(BaseModel):
    """The fields of a request. Every other field is in one of the tables `refused`, `ignored` and `renamed`
    (fields/other_servers.py), or it is unknown."""

    model_config = ConfigDict(
        strict=True, extra="ignore", hide_input_in_errors=True, json_schema_extra=_describe_unserved
    )
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED
    ignored: ClassVar[Mapping[str, str]] = IGNORED
    renamed: ClassVar[Mapping[str, str]] = RENAMED

    @classmethod
    def from_body(cls, body: Any, max_model_len: int) -> Self:
        """The request in a decoded JSON body. Raises ApiError 400."""
        return parse(cls, body, max_model_len)

    @classmethod
    def refuse_unserved(cls, body: Mapping[str, Any]) -> None:
        """Raises ApiError 400 that names up to 10 fields of the body that are not served."""
        refuse_unserved(_served(cls), body, refused=cls.refused, ignored=cls.ignored, renamed=cls.renamed)


class CacheRetention(ClosedPart):
    """The KV of tokens start to end - 1 (end 0: all that follow) has this eviction priority, 0 to 100, forever or for
    `duration_ms` after their last use. Tokens outside all ranges have priority 35. With `decode`, positions count from
    the first generated token."""

    start: Uint32 = 0
    end: Uint32 = 0
    priority: Uint32
    duration_ms: Uint32 = 0
    decode: bool = False


class StreamOptions(ClosedPart):
    """`include_usage`: a last chunk has the usage. `continuous_usage_stats`: with `include_usage`, every chunk has it.
    `include_event_ids`: each event has an id, with which the stream can be resumed."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_event_ids: Flag | None = None
    include_obfuscation: Flag | None = Field(
        None, description=f"Ignored: {IGNORED_INSIDE['stream_options.include_obfuscation']}."
    )


def _described_limits(field: SamplingParam | MetadataField) -> dict[str, Any]:
    """The limits of a plain field in JSON Schema, for /openapi.json. The checks are where the fields are used."""
    if isinstance(field, SamplingParam):
        low = "exclusiveMinimum" if field.above_low else "minimum"
        return {low: -1 if field.minus_one_is_zero else field.low, "maximum": field.high, "description": field.what}
    return {"exclusiveMinimum": 0} if field.above_zero else {"maxLength": field.max_chars} if field.max_chars else {}


def _plain_fields(declared: Mapping[str, SamplingParam | MetadataField]) -> dict[str, Any]:
    """The declared fields as pydantic's."""
    return {
        name: (KINDS[field.kind] | None, Field(None, json_schema_extra=_described_limits(field)))
        for name, field in declared.items()
    }


if TYPE_CHECKING:
    MetadataFields = RequestBody
    PlainFields = RequestBody
else:
    MetadataFields = create_model("MetadataFields", __base__=RequestBody, **_plain_fields(METADATA))
    PlainFields = create_model("PlainFields", __base__=MetadataFields, **_plain_fields(SAMPLING))


class SharedFields(MetadataFields):
    """The fields that all requests for work of the model share, in addition to those of paceline.request_fields."""

    model: str | None = None
    # OpenAI's name for `tenant`.
    user: str | None = None
    # How long parts of the sequence stay cached (as TensorRT-LLM's KvCacheRetentionConfig).
    cache_retention: list[CacheRetention] | None = None
    # The answer's id after its prefix, unless the request has an Idempotency-Key or X-Request-Id.
    request_id: str | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Side | None = None

    def truncation(self, max_model_len: int) -> Truncation | None:
        """How the prompt may be cut. Raises ApiError 400."""
        return make_truncation(self.truncate_prompt_tokens, self.truncation_side, max_model_len)

    @property
    def named_tenant(self) -> str | None:
        """The tenant that the body names. `user` does not name one: with API keys it is an end user of the key."""
        tenant: str | None = getattr(self, "tenant")  # noqa: B009 - declared in paceline.request_fields
        return tenant

    def metadata(self) -> inference_pb2.Submission:
        """The metadata as fields of a submission. Raises ApiError 400."""
        values = {name: getattr(self, name) for name in METADATA}
        if values["tenant"] is None and self.user:
            values["tenant"] = tenant_of_user(self.user)
        retention = [common_pb2.RetentionRange(**vars(one)) for one in self.cache_retention or ()]
        return check_metadata(values, retention)


class SamplingFields(SharedFields, PlainFields):
    """The fields that completions and chat completions share, in addition to those of paceline.request_fields."""

    max_tokens: Integer | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: list[Integer] | None = None
    prompt_logprobs: Integer | None = None
    seed: Seed = None
    stop: Stop = Field([])
    min_tokens: Integer | None = None
    ignore_eos: Flag | None = None
    stop_token_ids: list[Integer] | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    # The form that the output must have.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    # Beam search as in transformers. `best_of` (default: `n`) is its width.
    use_beam_search: Flag | None = None
    length_penalty: Number | None = None
    early_stopping: EarlyStopping | None = None
    return_token_ids: Flag | None = None
    # Log probabilities name tokens by their ids.
    return_tokens_as_token_ids: Flag | None = None
    # The least number of tokens in an event between the first and the last.
    stream_interval: Annotated[Integer, Field(ge=1, le=2**31 - 1)] | None = None

    def shown(self, *, tokens_as_ids: bool = False) -> Shown:
        """What the answer shows besides the text. `tokens_as_ids`: where the request does not say."""
        given = self.return_tokens_as_token_ids
        return Shown(bool(self.return_token_ids), tokens_as_ids if given is None else given)

    def structure(self) -> Structure | None:
        """The form that the output must have. Raises ApiError 400."""
        format_ = self.response_format.structure() if self.response_format else None
        if self.structured_outputs is None:
            return format_
        if format_ is not None:
            raise invalid("structured_outputs", "structured_outputs and response_format exclude each other")
        return self.structured_outputs.structure()

    def jobs(self, builder: RequestBuilder, job: GenerateJob) -> list[GenerateJob]:
        """One job for each sample of the prompt; one job for a beam search. Raises ApiError 400."""
        n, best_of = check_samples(self.n, self.best_of, bool(self.stream))
        if not self.use_beam_search:
            return builder.samples(job, n, best_of)
        if self.stream:
            raise invalid("stream", "a beam search has nothing to show before its end")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        make_search(job, check_beam(self.sampling(), best_of, n, penalty, self.early_stopping or False))
        return [job]

    def sampling(self) -> SamplingChoices:
        """The sampling fields, for RequestBuilder."""
        return SamplingChoices(
            numbers={name: value for name in SAMPLING if (value := getattr(self, name)) is not None},
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=bool(self.ignore_eos),
            stop=self.stop,
            stop_token_ids=self.stop_token_ids or (),
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            logit_bias=self.logit_bias,
            bad_words=self.bad_words or (),
            allowed_token_ids=self.allowed_token_ids,
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.prompt_logprobs,
        )

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each token. None: report no log probabilities."""
        raise NotImplementedError


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    add_special_tokens: Flag | None = None
    # Show the prompt before its continuation, with log probabilities if the output has them. With `max_tokens` 0 show
    # only the prompt.
    echo: Flag | None = None
    logprobs: NumLogprobs = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_echoes(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> SamplingChoices:
        choices = super().sampling()
        if self.echo and choices.prompt_logprobs is None:
            choices.prompt_logprobs = choices.logprobs
        if self.only_echoes:
            if choices.min_tokens:
                raise invalid("min_tokens", "min_tokens must be between 0 and max_tokens (0)")
            choices.max_tokens = 1  # a token that is not shown: it makes the workers compute the prompt
        return choices


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(json_schema_extra={"minItems": 1})
    max_completion_tokens: Integer | None = None
    add_generation_prompt: Flag | None = None
    add_special_tokens: NoneAdded = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    continue_final_message: Flag | None = None
    documents: list[Variables] | None = None
    # Templates of reasoning models read this variable, or `enable_thinking`, which is false for "none".
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Show the last message before the output, if it is the assistant's.
    echo: Flag | None = None
    return_prompt_text: Flag | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    def tool_use(self) -> ToolUse:
        """The tools, and which calls the answer must have."""
        is_named = isinstance(self.tool_choice, NamedChoice)  # which stands for one call, as in vLLM
        return ToolUse(self.tools or (), self.tool_choice, self.parallel_tool_calls is not False and not is_named)

    def for_template(self) -> TemplateInput:
        """What the chat template gets. Raises ApiError 400."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        tools = [tool.for_template() for tool in self.tools or ()]
        extras = ChatExtras(bool(self.continue_final_message), tools, self.documents, self.chat_template)
        return template_input(self.messages, self.add_generation_prompt, variables, extras)

    def echoed(self) -> str | None:
        """The text that the answer shows before the output."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else None

    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def sampling(self) -> SamplingChoices:
        choices = super().sampling()
        if self.max_completion_tokens is not None:
            choices.max_tokens = self.max_completion_tokens
        return choices


class TokenizeRequest(RequestBody):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    continue_final_message: Flag | None = None
    # Shown to the chat template, as they are.
    tools: list[dict[str, Any]] | None = None
    return_token_strs: Flag | None = None

    def for_template(self) -> TemplateInput:
        """What the chat template gets. Raises ApiError 400."""
        extras = ChatExtras(bool(self.continue_final_message), self.tools, None, self.chat_template)
        variables = self.chat_template_kwargs or {}
        return template_input(self.messages or (), self.add_generation_prompt, variables, extras)


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


R = TypeVar("R", bound=RequestBody)


@cache
def _served(cls: type[RequestBody]) -> frozenset[str]:
    return frozenset(cls.model_fields)


def parse(cls: type[R], body: Any, max_model_len: int) -> R:
    """The request in a decoded JSON body. Raises ApiError 400 that names the fields that are unsupported, or else
    those with a wrong type (up to 10)."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    check_lengths(body, max_model_len)
    refusal: ApiError | None = None
    try:
        cls.refuse_unserved(body)
    except ApiError as error:
        refusal = error
    try:
        request = cls.model_validate(body)
    except ValidationError as error:
        raise _both(refusal, as_api_error(error)) from None
    if refusal is not None:
        raise refusal
    if isinstance(request, SamplingFields) and body.get("stream_options") and not request.stream:
        raise invalid("stream_options", "stream_options is only possible with stream: true")
    if isinstance(request, SamplingFields):
        _check_logprobs(request, body)
    if isinstance(request, SamplingFields) and not request.use_beam_search:
        given = {"length_penalty": request.length_penalty not in (None, 1.0), "early_stopping": request.early_stopping}
        for name in (name for name, is_given in given.items() if is_given):
            raise invalid(name, f"{name} is only possible with use_beam_search: true")
    if isinstance(request, ChatRequest):
        if not request.messages:
            raise invalid("messages", "messages must not be empty")
        check_tools(request.tools or (), request.tool_choice)
    return request


def _both(refusal: ApiError | None, wrong: ApiError) -> ApiError:
    """An error that names the unsupported fields of `refusal`, and those of `wrong`."""
    if refusal is None:
        return wrong
    return invalid(refusal.param, f"{refusal.message}; {wrong.message}", code=refusal.code)


def _check_logprobs(request: SamplingFields, body: Mapping[str, Any]) -> None:
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not possible with stream: true")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs is only possible with logprobs: true")
