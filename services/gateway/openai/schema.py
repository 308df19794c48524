"""The supported OpenAI requests. Types are strict. An unsupported field is refused by name, and never ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from paceline.request_fields import METADATA, SAMPLING
from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.list_limits import check_lengths
from services.gateway.engine.request import (
    GenerateJob,
    RequestBuilder,
    check_beam,
    check_metadata,
    check_samples,
    make_search,
)
from services.gateway.engine.sampling import SamplingChoices
from services.gateway.errors import ApiError, invalid
from services.gateway.grammars.structure import Structure
from services.gateway.openai.structured import ResponseFormat, StructuredOutputs
from services.gateway.openai.values import (
    BadWords,
    Content,
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

# Unsupported fields that would change the result, with the values that change nothing (null is always such a value).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": ([],),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "structural_tag": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "kv_transfer_params": (),
}
# Fields of older vLLM and of SGLang that have another name here.
_RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
}


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class CacheRetention(_Request):
    """Tokens start ... end - 1 (end 0: all that follow) keep their KV with a priority of 0 to 100, forever or for
    `duration_ms` after their last use. Tokens outside all ranges have priority 35. With `decode`, positions count from
    the first generated token."""

    model_config = ConfigDict(extra="forbid")

    start: Uint32 = 0
    end: Uint32 = 0
    priority: Uint32
    duration_ms: Uint32 = 0
    decode: bool = False


class StreamOptions(_Request):
    """Whether usage comes in a last chunk, and whether also in every chunk; whether each event has an id, with which
    the stream can be resumed."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_event_ids: bool | None = None


if TYPE_CHECKING:
    _PlainFields = _Request
else:
    _PlainFields = create_model(
        "_PlainFields",
        __base__=_Request,
        **{name: (field.kind | None, None) for name, field in (SAMPLING | METADATA).items()},
    )


class SamplingFields(_PlainFields):
    """The fields that completions and chat completions share, in addition to those of paceline.request_fields."""

    model: str | None = None
    max_tokens: int | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    seed: Seed = None
    stop: Stop = Field([])
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # The form that the output must have.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    # Beam search as in transformers. `best_of` (default: `n`) is its width.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    # OpenAI's name for `tenant`.
    user: str | None = None
    # How long parts of the sequence stay cached (as TensorRT-LLM's KvCacheRetentionConfig).
    cache_retention: list[CacheRetention] | None = None

    def metadata(self) -> inference_pb2.Submission:
        """The metadata as fields of a submission. Raises ApiError 400."""
        values = {name: getattr(self, name) for name in METADATA}
        if values["tenant"] is None and self.user:
            values["tenant"] = self.user[: METADATA["tenant"].max_chars]
        retention = [common_pb2.RetentionRange(**vars(one)) for one in self.cache_retention or ()]
        return check_metadata(values, retention)

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
    add_special_tokens: bool | None = None
    # Show the prompt before its continuation, with log probabilities if the output has them. With `max_tokens` 0 show
    # only the prompt.
    echo: bool | None = None
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


class ChatMessage(_Request):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_template(self) -> dict[str, str]:
        """The message for a chat template. `developer` is OpenAI's newer name for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: NoneAdded = None
    chat_template_kwargs: Variables | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def sampling(self) -> SamplingChoices:
        choices = super().sampling()
        if self.max_completion_tokens is not None:
            choices.max_tokens = self.max_completion_tokens
        return choices


class TokenizeRequest(_Request):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


R = TypeVar("R", bound=_Request)


def parse(cls: type[R], body: Any, max_model_len: int) -> R:
    """The request in a decoded JSON body. Raises ApiError 400 that names the first wrong field."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    check_lengths(body, max_model_len)
    if issubclass(cls, SamplingFields):
        _refuse_unsupported(cls, body)
    try:
        request = cls.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error) from None
    if isinstance(request, SamplingFields) and request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only possible with stream: true")
    if isinstance(request, SamplingFields):
        _check_logprobs(request, body)
    if isinstance(request, SamplingFields) and not request.use_beam_search:
        given = {"length_penalty": request.length_penalty not in (None, 1.0), "early_stopping": request.early_stopping}
        for name in (name for name, is_given in given.items() if is_given):
            raise invalid(name, f"{name} is only possible with use_beam_search: true")
    if isinstance(request, ChatRequest) and not request.messages:
        raise invalid("messages", "messages must not be empty")
    return request


def _check_logprobs(request: SamplingFields, body: Mapping[str, Any]) -> None:
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not possible with stream: true")
    if not body.get("top_logprobs"):
        return
    if isinstance(request, CompletionRequest):
        raise invalid("top_logprobs", "top_logprobs is for chats; here logprobs says how many")
    if not body.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs is only possible with logprobs: true")


def _refuse_unsupported(cls: type[SamplingFields], body: Mapping[str, Any]) -> None:
    for name in _RENAMED.keys() & body.keys():
        if body[name] is not None:
            raise invalid(name, f"{name} is called {_RENAMED[name]} here", code="unsupported_value")
    for name in (_NEUTRAL.keys() & body.keys()) - cls.model_fields.keys():
        value = body[name]
        if value is None:
            continue
        # In Python a bool is an int. Here the two types differ.
        if not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[name]):
            wanted = ", ".join(json.dumps(neutral) for neutral in _NEUTRAL[name][:1]) or "null"
            raise invalid(name, f"{name} is not supported yet (leave it out, or {wanted})", code="unsupported_value")


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(path, f"{path} is required", code="missing_required_parameter")
    return invalid(path, f"{path}: {message[0].lower()}{message[1:]}", code="invalid_type")
