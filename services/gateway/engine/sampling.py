"""Checks a client's sampling parameters, fills in defaults, and converts them for the scheduler.

The numbers are those of paceline.request_fields. Every token id is checked against the vocabulary here; the scheduler
checks them again. Limits: docs/sampling.md.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.request_fields import MIN_FLOAT32, SAMPLING, SamplingParam
from paceline.v1 import common_pb2
from services.gateway.errors import ApiError, invalid
from services.gateway.text.model_files import ModelFiles

MAX_STOP_TOKEN_IDS = 256
MAX_BIAS = 100.0  # absolute value
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64  # per entry
MAX_BAD_WORDS_TOKENS = 4096  # of all entries, in both spellings
MAX_ALLOWED_TOKENS = 8192
MAX_TOP_LOGPROBS = 20
# Below this temperature sampling is greedy in practice. vLLM has the same limit (_SAMPLING_EPS in sampling_params.py),
# but only 0 is below it there: vLLM first raises any other temperature to at least 0.01 (_MAX_TEMP).
_GREEDY_TEMPERATURE = 1e-5


@dataclass(slots=True)
class SamplingChoices:
    """Sampling parameters as the client gives them; None takes the default. The field names are the public names.

    `numbers`: the parameters of paceline.request_fields that the client gives.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()  # texts, or token ids
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None  # how many of the most likely tokens to report beside the sampled token
    prompt_logprobs: int | None = None
    grammar: str = ""  # the result of RequestBuilder.grammar


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names that an API gives to the fields, for error messages."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    num_logprobs: str = "logprobs"
    prefix: str = ""

    def of(self, name: str) -> str:
        """The public name of a sampling field."""
        return self.prefix + {"max_tokens": self.max_tokens, "logprobs": self.num_logprobs}.get(name, name)


class Vocabulary(Protocol):
    """Maps texts and token ids for the served model."""

    def check_token_ids(self, token_ids: Sequence[int], field_name: str) -> array[int]:
        """The packed ids. Raises ApiError 400."""
        ...

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises ApiError 400."""
        ...


def sampling_params(
    choices: SamplingChoices, files: ModelFiles, vocabulary: Vocabulary, names: FieldNames
) -> common_pb2.SamplingParams:
    """All sampling parameters except max_tokens and min_tokens. Raises ApiError 400."""
    params = common_pb2.SamplingParams()
    wrong: list[ApiError] = []
    for name, param in SAMPLING.items():
        value = choices.numbers.get(name)
        try:
            value = files.defaults.get(name, param.default) if value is None else _checked(value, param, names.of(name))
        except ApiError as error:
            wrong.append(error)
            continue
        if name == "temperature" and value < _GREEDY_TEMPERATURE:
            value = 0.0
        setattr(params, name, param.to_wire(value))
    if wrong:
        raise invalid(wrong[0].param, "; ".join(error.message for error in wrong))
    params.seed, params.ignore_eos = _seed(choices, names), choices.ignore_eos
    if choices.stop_token_ids:
        params.stop_token_ids.extend(_stop_tokens(choices.stop_token_ids, vocabulary, names.of("stop_token_ids")))
    # The rest is set only where it changes the result. Most requests have none of these fields.
    if choices.logit_bias:
        params.logit_bias.update(_logit_bias(choices.logit_bias, vocabulary, names.of("logit_bias")))
    if choices.bad_words:
        params.bad_words.extend(_bad_words(choices.bad_words, vocabulary, names.of("bad_words")))
    if choices.allowed_token_ids is not None:
        params.allowed_token_ids = _allowed(choices.allowed_token_ids, vocabulary, names.of("allowed_token_ids"))
    if choices.logprobs is not None:
        params.logprobs = True
        params.num_top_logprobs = _num_top(choices.logprobs, names.of("logprobs"))
    if choices.prompt_logprobs is not None:
        params.prompt_logprobs = True
        params.num_top_prompt_logprobs = _num_top(choices.prompt_logprobs, names.of("prompt_logprobs"))
    if choices.grammar:
        params.grammar = choices.grammar
    return params


def refuse_for_beams(choices: SamplingChoices) -> None:
    """Refuse options that a beam search cannot honour: it does not sample, and ranks by the model's own probabilities.
    Raises ApiError 400."""
    numbers = {name: choices.numbers.get(name) for name in SAMPLING}
    neutral: dict[str, tuple[object, ...]] = {name: (param.beam_value,) for name, param in SAMPLING.items()}
    neutral |= {"top_k": (-1,), "logit_bias": ({},), "bad_words": ((), []), "allowed_token_ids": ()}
    neutral |= {"logprobs": (), "prompt_logprobs": ()}
    for name, values in neutral.items():
        if (numbers[name] if name in numbers else getattr(choices, name)) not in (None, *values):
            raise invalid(name, f"{name}: beam search does not sample, so it has no such option; leave it out")
    if choices.stop:
        raise invalid("stop", "beam search knows no stop strings; use stop_token_ids")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises ApiError 400."""
    if not low <= value <= high:
        raise invalid(name, f"{name} must be between {_shown(low)} and {_shown(high)}, not {_shown(value)}")


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _checked(value: float, param: SamplingParam, name: str) -> float:
    if param.minus_one_is_zero and value == -1:
        return 0
    if not param.above_low:
        check_range(name, value, param.low, param.high)
        return value
    if not param.accepts(value):
        raise invalid(name, f"{name} must be above {param.low:g} and at most {param.high:g}, not {value:g}")
    # Sent in 32 bits, a smaller number would become 0, which is invalid or means that the field is not set.
    return max(value, MIN_FLOAT32)


def _seed(choices: SamplingChoices, names: FieldNames) -> int:
    if choices.seed is None:
        # The seed is chosen once, so that the request gets the same tokens when it is submitted to a scheduler again.
        return random.getrandbits(64)
    if not -(2**63) <= choices.seed < 2**64:
        raise invalid(names.of("seed"), f"{names.of('seed')} must fit into 64 bits")
    return choices.seed % 2**64


def _num_top(count: int, name: str) -> int:
    check_range(name, count, 0, MAX_TOP_LOGPROBS)
    return count


def _logit_bias(biases: Mapping[int, float], vocabulary: Vocabulary, name: str) -> dict[int, float]:
    if len(biases) > MAX_BIASED_TOKENS:
        raise invalid(name, f"{name} has {len(biases)} tokens; at most {MAX_BIASED_TOKENS} are possible")
    vocabulary.check_token_ids(list(biases), name)
    for bias in biases.values():
        check_range(name, bias, -MAX_BIAS, MAX_BIAS)
    return dict(biases)


def _stop_tokens(token_ids: Sequence[int], vocabulary: Vocabulary, name: str) -> list[int]:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(name, f"at most {MAX_STOP_TOKEN_IDS} stop tokens are possible")
    return sorted(set(vocabulary.check_token_ids(token_ids, name)))


def _allowed(token_ids: Sequence[int], vocabulary: Vocabulary, name: str) -> bytes:
    if not token_ids:
        raise invalid(name, f"{name} must not be empty: nothing could be sampled")
    if len(token_ids) > MAX_ALLOWED_TOKENS:
        raise invalid(name, f"{name} has {len(token_ids)} tokens; at most {MAX_ALLOWED_TOKENS} are possible")
    return np.unique(np.array(vocabulary.check_token_ids(token_ids, name), "<i4")).tobytes()


def _bad_words(words: Sequence[str | Sequence[int]], vocabulary: Vocabulary, name: str) -> list[bytes]:
    """Ban a text both as it is and with a space before it, which begins a word in most vocabularies."""
    if len(words) > MAX_BAD_WORDS:
        raise invalid(name, f"{name} has {len(words)} entries; at most {MAX_BAD_WORDS} are possible")
    banned: dict[bytes, None] = {}
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise invalid(name, f"{name}: an entry has 1 to {MAX_BAD_WORD_CHARS} characters or tokens, not {len(word)}")
        for ids in _spellings(word, vocabulary, name) if isinstance(word, str) else [list(word)]:
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise invalid(name, f"{name}: an entry has 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(ids)}")
            banned[np.array(vocabulary.check_token_ids(ids, name), "<i4").tobytes()] = None
    if (total := sum(map(len, banned)) // 4) > MAX_BAD_WORDS_TOKENS:
        raise invalid(name, f"{name} has {total} tokens in all; at most {MAX_BAD_WORDS_TOKENS} are possible")
    return list(banned)


def _spellings(word: str, vocabulary: Vocabulary, name: str) -> list[list[int]]:
    bare = word.lstrip(" ")
    try:
        return [vocabulary.encode_word(text) for text in ((bare, " " + bare) if bare else (word,))]
    except ApiError as error:
        raise invalid(name, error.message) from None
