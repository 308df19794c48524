"""Sampling parameters of the engine contracts as SamplingChoices. What Paceline does not support is refused by name.
Two are ignored: `grammar_from_first_token`, because every grammar starts there, and `spaces_between_special_tokens`,
because false may mean that it is not given.

In these contracts a number that is not given has its neutral value, and not the model's default: the router reads the
defaults from GetModelInfo and applies them. A number without presence (proto3) is not given if it is 0, except
SGLang's temperature: there 0 is greedy.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from paceline.request_fields import SAMPLING
from paceline.third_party import sglang_scheduler_pb2 as sglang
from paceline.third_party import vllm_engine_pb2 as vllm
from services.gateway.engine.list_limits import check_length
from services.gateway.engine.sampling import FieldNames, SamplingChoices
from services.gateway.errors import invalid
from services.gateway.grammars.structure import Structure, from_choices, from_schema

_PREFIX = "sampling_params."
VLLM_TOKENS = FieldNames(prompt="tokenized.input_ids", prefix=_PREFIX)
VLLM_TEXT = FieldNames(prompt="text", prefix=_PREFIX)
SGLANG_TOKENS = FieldNames(
    prompt="tokenized.input_ids", max_tokens="max_new_tokens", num_logprobs="top_logprobs_num", prefix=_PREFIX
)
_ALL_UINT32 = 2**32 - 1  # -1 in an unsigned field
_JSON_OBJECT = {"type": "object"}


def refuse_set(message: Message, names: Iterable[str], prefix: str = "") -> None:
    """Raises ApiError 400 if one of these fields is set."""
    given = {field.name for field, _ in message.ListFields()}
    for name in names:
        if name in given:
            raise invalid(prefix + name, f"{prefix}{name} is not supported")


def check_rank(message: vllm.GenerateRequest | sglang.GenerateRequest | sglang.EmbedRequest) -> None:
    """The gateway is one rank, 0, whichever worker runs a request. Some routers write -1 for any rank. Raises
    ApiError 400."""
    if message.data_parallel_rank not in (0, -1):
        raise invalid("data_parallel_rank", f"data_parallel_rank must be 0, not {message.data_parallel_rank}")


def numbers(message: Message, zeros: frozenset[str] = frozenset()) -> dict[str, float]:
    """The parameters of paceline.request_fields that the message has. `zeros`: for these, 0 is a value."""
    found: dict[str, float] = {}
    for name, param in SAMPLING.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            continue
        value = getattr(message, name)
        is_given = message.HasField(name) if field.has_presence else value != 0 or name in zeros
        found[name] = value if is_given else param.default
    if found.get("top_k") == _ALL_UINT32:
        found["top_k"] = -1
    return found


def vllm_choices(params: vllm.SamplingParams) -> SamplingChoices:
    """The choices of a request to vLLM's engine. Raises ApiError 400."""
    refuse_set(params, ("truncate_prompt_tokens",), _PREFIX)
    return SamplingChoices(
        numbers=numbers(params),
        seed=params.seed if params.HasField("seed") else None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens or None,
        ignore_eos=params.ignore_eos,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logit_bias=params.logit_bias or None,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def sglang_choices(request: sglang.GenerateRequest) -> SamplingChoices:
    """The choices of a request to SGLang's scheduler. Raises ApiError 400."""
    params = request.sampling_params
    refuse_set(params, ("custom_params",), _PREFIX)
    if params.HasField("stream_interval") and params.stream_interval != 1:
        raise invalid(_PREFIX + "stream_interval", f"{_PREFIX}stream_interval must be 1, not {params.stream_interval}")
    num_top = request.top_logprobs_num
    return SamplingChoices(
        numbers=numbers(params, zeros=frozenset({"temperature"})),
        max_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else None,
        min_tokens=params.min_new_tokens or None,
        ignore_eos=params.ignore_eos,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.no_stop_trim,
        logit_bias=sglang_bias(params),
        logprobs=num_top if request.return_logprob else None,
        prompt_logprobs=num_top if request.return_logprob and request.logprob_start_len >= 0 else None,
    )


def sglang_bias(params: sglang.SamplingParams) -> dict[int, float] | None:
    """SGLang writes token ids as text. Raises ApiError 400."""
    check_length("logit_bias", len(params.logit_bias), _PREFIX)
    try:
        return {int(token): bias for token, bias in params.logit_bias.items()} or None
    except ValueError as error:
        raise invalid(_PREFIX + "logit_bias", f"{_PREFIX}logit_bias: a key is not a token id: {error}") from None


def vllm_structure(params: vllm.SamplingParams) -> Structure | None:
    """The form of the output. Raises ApiError 400."""
    kind = params.WhichOneof("constraint")
    field = f"{_PREFIX}{kind}"
    match kind:
        case None:
            return None
        case "json_schema":
            return from_schema(field, params.json_schema)
        case "json_object":
            return from_schema(field, _JSON_OBJECT) if params.json_object else None
        case "regex":
            return Structure(field, "regex", params.regex)
        case "grammar":
            return Structure(field, "grammar", params.grammar)
        case "choice":
            return from_choices(field, params.choice.choices)
    raise invalid(field, f"{field} is not supported")


def sglang_structure(params: sglang.SamplingParams) -> Structure | None:
    """The form of the output. Raises ApiError 400."""
    kind = params.WhichOneof("constraint")
    field = f"{_PREFIX}{kind}"
    match kind:
        case None:
            return None
        case "json_schema":
            return from_schema(field, params.json_schema)
        case "regex":
            return Structure(field, "regex", params.regex)
        case "ebnf_grammar":
            return Structure(field, "grammar", params.ebnf_grammar)
    raise invalid(field, f"{field} is not supported")
