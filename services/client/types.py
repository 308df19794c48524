"""What the client takes, returns and raises, and the translation from and to the protocol."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import grpc
from google.protobuf.message import Message

from paceline.request_fields import METADATA, MIN_FLOAT32, SAMPLING, MetadataValues, SamplingNumbers
from paceline.v1 import common_pb2, inference_pb2

FinishReason = Literal["stop", "length", "abort"]
_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
Messages = Sequence[Mapping[str, str]]
_METADATA = frozenset({*METADATA, "request_id", "idempotency_key", "resume_after"})


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Search for the likeliest sequences, as transformers' generate(num_beams=width) does."""

    width: int
    num_return: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class Retention:
    """Give the KV of tokens start to end - 1 (end 0: all that follow) an eviction priority of 0 to 100 (lower ones are
    evicted first), for `duration_ms` after their last use (0: forever). Tokens outside all ranges have 35. With
    `decode`, positions count from the first generated token."""

    priority: int
    start: int = 0
    end: int = 0
    duration_ms: int = 0
    decode: bool = False


class Sampling(SamplingNumbers, total=False):
    """Keyword arguments of `generate` and `stream`. A missing argument takes the model's default."""

    logit_bias: Mapping[int, float]
    bad_words: str | Sequence[str | Sequence[int]]  # banned as they are and after a space; or token ids
    allowed_token_ids: Sequence[int]
    logprobs: int  # report each token's log probability, and this many of the most likely tokens at its position
    prompt_logprobs: int
    seed: int  # 64 bits; -1: none
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool  # in the text; default: true
    # The form of the text, one of: a JSON Schema (or its text); a regular expression; a list of choices; a grammar in
    # the notation of Lark or llama.cpp.
    json_schema: Mapping[str, Any] | str
    regex: str
    choice: Sequence[str]
    grammar: str


_SAMPLING = Sampling.__annotations__.keys()
# Options that must be above 0. A very small value would become 0 in the protocol's 32 bits.
_SHARES = tuple(name for name, param in SAMPLING.items() if param.above_low)


class Options(Sampling, MetadataValues, total=False):
    """More keyword arguments.

    With an `idempotency_key` the same request may be sent again to any gateway. One gateway does not run it twice, and
    all gateways give the same tokens. `resume_after`: the number of tokens that the client has; only later tokens are
    sent."""

    request_id: str
    beam: BeamParams
    idempotency_key: str
    resume_after: int
    cache_retention: Sequence[Retention]


class EmbedOptions(MetadataValues, total=False):
    """Keyword arguments of `embed`. `dimensions`: elements of the vector; only Matryoshka models."""

    request_id: str
    dimensions: int


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """One result of a beam search. `score`: its log probability, divided by length ** length_penalty."""

    text: str
    token_ids: list[int]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens`: prompt tokens that were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token, before temperature and filters. `top`: the most likely tokens at its position,
    best first. `rank`: only for a prompt token; 1 is the most likely token."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of a stream. The last piece has `finish_reason` and `usage`, the first has `prompt_logprobs`.

    `logprobs`: one per token, if the request asks for them. `prompt_logprobs`: one per prompt token but the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    hypotheses: tuple[BeamHypothesis, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. After a beam search, the text and the tokens are those of the best hypothesis. `logprobs`: see
    Piece."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    hypotheses: tuple[BeamHypothesis, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """The vector of an input."""

    embedding: list[float]
    usage: Usage


class PacelineError(Exception):
    """A request failed. `code`: the gRPC status. `field`: the request field at fault, if any."""

    def __init__(self, code: grpc.StatusCode, message: str, *, field: str | None, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(PacelineError):
    """The request is invalid: see `field`."""


class NotFound(PacelineError):
    """The model does not exist."""


class Overloaded(PacelineError):
    """The queue is full, or the API key is at a quota: retry after `retry_after_s`."""


class Unavailable(PacelineError):
    """The server, or everything behind it, is away."""


_ERRORS: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def error_from(
    code: grpc.StatusCode, details: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> PacelineError:
    """The exception for a failed call."""
    metadata = dict(trailers or ())
    field, retry = metadata.get("field"), metadata.get("retry-after-s")
    return _ERRORS.get(code, PacelineError)(
        code, details or code.name, field=str(field) if field else None, retry_after_s=float(retry) if retry else None
    )


def make_request(
    prompt: str | None, messages: Messages | None, token_ids: Sequence[int] | None, model: str, options: Options
) -> inference_pb2.GenerateRequest:
    """The protocol's request, without options that are None. Raises TypeError unless one kind of prompt is given, and
    for unknown or wrong options; ValueError for a token id, or a number of `beam` or `cache_retention`, that the
    protocol cannot hold; KeyError for a message without role or content."""
    if sum(value is not None for value in (prompt, messages, token_ids)) != 1:
        raise TypeError("give exactly one of prompt, messages and token_ids")
    request = inference_pb2.GenerateRequest(model=model)
    values = _given(options, Options)
    sampling = {name: values[name] for name in _SAMPLING & values.keys()}
    _fill(request.sampling, _sampling_options(sampling))
    _fill(request, {name: values[name] for name in _METADATA & values.keys()})
    if "beam" in values:
        request.beam.CopyFrom(_beam(values["beam"]))
    for one in values.get("cache_retention", ()):
        request.cache_retention.add(**dataclasses.asdict(one))
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.messages.SetInParent()
        for message in messages:
            request.messages.messages.add(role=message["role"], content=message["content"])
    elif token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    return request


def make_embed_request(
    text: str | None, token_ids: Sequence[int] | None, model: str, options: EmbedOptions
) -> inference_pb2.EmbedRequest:
    """The protocol's request, without options that are None. Raises TypeError unless one kind of input is given, and
    for unknown or wrong options."""
    if (text is None) == (token_ids is None):
        raise TypeError("give exactly one of text and token_ids")
    request = inference_pb2.EmbedRequest(model=model)
    _fill(request, _given(options, EmbedOptions))
    if text is not None:
        _fill(request, {"text": text})
    elif token_ids is not None:
        request.token_ids.SetInParent()
        _fill(request.token_ids, {"ids": token_ids})
    return request


def _given(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """The options that are not None. Raises TypeError for one that is not known."""
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r}")
    return {name: value for name, value in options.items() if value is not None}


def _fill(message: Message, values: Mapping[str, Any]) -> None:
    """Set the fields. Raises TypeError with the name of the field if the protocol cannot hold its value."""
    for name, value in values.items():
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}: {error}") from error


def _sampling_options(values: dict[str, Any]) -> dict[str, Any]:
    """The options by the protocol's names."""
    if "allowed_token_ids" in values and not len(values["allowed_token_ids"]):
        raise TypeError("allowed_token_ids is empty: nothing could be sampled")
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    seed = values.get("seed")
    if seed == -1:
        del values["seed"]
    elif isinstance(seed, Integral) and -(2**63) <= int(seed) < 0:
        values["seed"] = int(seed) % 2**64
    if "json_schema" in values and not isinstance(values["json_schema"], str):
        values["json_schema"] = json.dumps(values["json_schema"])
    words = values.pop("bad_words", ())
    words = [words] if isinstance(words, str) else words
    values |= {name: MIN_FLOAT32 for name in _SHARES if 0 < (values.get(name) or 0) < MIN_FLOAT32}
    return {
        **values,
        "bad_words": [word for word in words if isinstance(word, str)],
        "bad_word_ids": [{"ids": word} for word in words if not isinstance(word, str)],
    }


def _beam(beam: BeamParams) -> inference_pb2.BeamOptions:
    stopping = {True: inference_pb2.EARLY_STOPPING_FIRST, "never": inference_pb2.EARLY_STOPPING_NEVER}
    return inference_pb2.BeamOptions(
        width=beam.width,
        num_return=beam.num_return,
        length_penalty=beam.length_penalty,
        early_stopping=stopping.get(beam.early_stopping, inference_pb2.EARLY_STOPPING_UNSPECIFIED),
    )


def embed_result_from(response: inference_pb2.EmbedResponse) -> EmbedResult:
    """The server's answer."""
    usage = response.usage
    return EmbedResult(list(response.embedding), Usage(usage.prompt_tokens, 0, usage.cached_tokens))


def piece_from(response: inference_pb2.GenerateResponse) -> Piece:
    """A message of the stream as a piece."""
    usage = response.usage
    return Piece(
        response.text,
        list(response.token_ids),
        _REASONS.get(response.finish_reason),
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if response.HasField("usage")
        else None,
        tuple(
            BeamHypothesis(found.text, list(found.token_ids), found.score, _REASONS[found.finish_reason])
            for found in response.hypotheses
        ),
        tuple(map(_token_logprob, response.logprobs)),
        tuple(map(_token_logprob, response.prompt_logprobs)),
    )


def _token_logprob(token: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.logprob, tuple(zip(token.top_token_ids, token.top_logprobs, strict=True)), token.rank)


def result_from(pieces: Sequence[Piece]) -> Result:
    """Combine all pieces of a stream into one answer."""
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None or last.usage is None:
        raise Unavailable(
            grpc.StatusCode.UNAVAILABLE, "the stream ended without a finish reason", field=None, retry_after_s=None
        )
    tokens = [token for piece in pieces for token in piece.token_ids]
    return Result(
        "".join(piece.text for piece in pieces),
        tokens,
        last.finish_reason,
        last.usage,
        last.hypotheses,
        tuple(token for piece in pieces for token in piece.logprobs),
        tuple(token for piece in pieces for token in piece.prompt_logprobs),
    )
