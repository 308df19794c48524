"""The shapes of answers, for /openapi.json only: the gateway writes its answers by hand, because they are frequent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    """Clients must ignore fields that they do not know: later versions have more."""

    model_config = ConfigDict(extra="allow")


class ErrorDetails(_Answer):
    """`type`: vLLM's name of the error, or Paceline's if vLLM has none. `code`: the HTTP status, or
    context_length_exceeded. `reason`: a stable name."""

    message: str
    type: str
    param: str | None
    code: int | str
    reason: str | None


class Error(_Answer):
    error: ErrorDetails


class CachedTokens(_Answer):
    cached_tokens: int


class ReasoningTokens(_Answer):
    reasoning_tokens: int


class TokenUsage(_Answer):
    """Tokens over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class Timings(_Answer):
    """Where the time went. llama.cpp has the fields up to `predicted_per_second`. Times are in milliseconds, and null
    if no service knows them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float | None
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float | None
    cache_device_n: int
    cache_host_n: int
    preemptions: int
    restarts: int


_FinishReason = Literal["stop", "length", "tool_calls"]


class _Choice(_Answer):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: _FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None


class CompletionChoice(_Choice):
    text: str
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(_Choice):
    message: AssistantMessage


class _WholeAnswer(_Answer):
    id: str
    created: int
    model: str
    usage: TokenUsage
    timings: Timings


class Completion(_WholeAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_WholeAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None = None


class _Event(_Answer):
    """An event of a stream. The last one before `[DONE]` has the timings."""

    id: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: TokenUsage | None = None
    timings: Timings | None = None


class CompletionEvent(_Event):
    object: Literal["text_completion"]


class ChatCompletionEvent(_Event):
    object: Literal["chat.completion.chunk"]


class EmbeddingVector(_Answer):
    """`embedding`: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_Answer):
    """The vectors of all inputs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingVector]
    usage: TokenUsage
    timings: Timings


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Answer):
    prompt: str


class HealthStatus(_Answer):
    status: Literal["ok"]


class Readiness(_Answer):
    """`reason`: why the server is not ready."""

    status: Literal["ready", "not ready"]
    workers: int
    model: str
    reason: str | None = None


class ServerLoad(_Answer):
    server_load: int


class ServerVersion(_Answer):
    version: str


class MessageErrorDetails(_Answer):
    """`type`: Anthropic's name."""

    type: str
    message: str


class MessageError(_Answer):
    """An error of Anthropic's API."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str


class MessageUsage(_Answer):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None
    cache_creation_input_tokens: int | None


class MessageAnswer(_Answer):
    """A whole answer of Anthropic's API. With `stream: true` the answer is a stream of Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings


class CountedTokens(_Answer):
    input_tokens: int


class ResponseObject(_Answer):
    """A response. With `stream: true` the answer is a stream of events. `output`: items of type message, reasoning and
    function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
    timings: Timings | None


class DeletedResponse(_Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemPage(_Answer):
    """Input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class FileObject(_Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FilePage(_Answer):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(_Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchCounts(_Answer):
    total: int
    completed: int
    failed: int


class BatchObject(_Answer):
    """A batch. Times are Unix times in seconds, and null for a status that the batch has not had."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    output_file_id: str | None
    error_file_id: str | None
    errors: dict[str, Any] | None
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchPage(_Answer):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
