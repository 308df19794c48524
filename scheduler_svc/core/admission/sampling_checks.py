"""Limits of sampling parameters. Their token ids are checked here, before they can reach a worker's kernels. (For
stop_token_ids, validation.py does that.)

Parameters that change the logits are checked together: few requests have any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from paceline.request_fields import FILTER_NAMES, PENALTY_NAMES, SAMPLING, SamplingParam
from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.rejection import Rejection, invalid
from scheduler_svc.core.requests.request import TOKEN_BYTES

MAX_BIAS = 100.0  # either side of zero
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64  # tokens of one bad word; the worker has the same limit
# Parameters travel with every sequence that a plan places, and count against MAX_PLAN_BYTES (core/workers/steps.py).
MAX_BAD_WORDS_TOKENS = 4096  # of all bad words together
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKENS = 8192
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18  # of one prompt: its tokens, and the likeliest tokens at each position

# Parameters that change the logits of tokens that occurred before in the sequence, or of tokens that the request names.
LOGIT_PARAMS = (*PENALTY_NAMES, "logit_bias", "bad_words", "allowed_token_ids")
# Without top_k: only a negative top_k is out of range, and check_sampling() refuses it with its own error text.
_FILTERS = tuple(SAMPLING[name] for name in FILTER_NAMES if name != "top_k")
_PENALTIES = tuple(SAMPLING[name] for name in PENALTY_NAMES)


def check_sampling(sampling: SamplingParams) -> bool:
    """Check what does not depend on the model. Returns whether a parameter changes the logits. Raises Rejection."""
    max_tokens, min_tokens = sampling.max_tokens, sampling.min_tokens
    if not max_tokens:
        raise invalid("max_tokens", "must be at least 1")
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    if not 0 <= (temperature := sampling.temperature) < math.inf:
        raise invalid("temperature", f"{temperature} is not a finite number of at least 0")
    if (top_k := sampling.top_k) < 0:
        raise invalid("top_k", f"{top_k} is negative; 0 keeps every token")
    _check_numbers(sampling, _FILTERS)
    if sampling.logprobs or sampling.prompt_logprobs:
        for name in ("num_top_logprobs", "num_top_prompt_logprobs"):
            if (count := getattr(sampling, name)) > MAX_TOP_LOGPROBS:
                raise invalid(name, f"{count} tokens; at most {MAX_TOP_LOGPROBS} are possible")
    if not any(getattr(sampling, name) for name in LOGIT_PARAMS):
        return False
    _check_numbers(sampling, _PENALTIES, "g")
    _check_bias(sampling)
    _check_bad_words(sampling)
    if (size := len(sampling.allowed_token_ids)) % TOKEN_BYTES:
        raise invalid("allowed_token_ids", "is not packed int32")
    if size > MAX_ALLOWED_TOKENS * TOKEN_BYTES:
        raise invalid(
            "allowed_token_ids", f"has {size // TOKEN_BYTES} tokens; at most {MAX_ALLOWED_TOKENS} are possible"
        )
    return True


def _check_numbers(sampling: SamplingParams, params: Iterable[SamplingParam], shown: str = "") -> None:
    for param in params:
        if not param.accepts(param.from_wire(value := getattr(sampling, param.name))):
            raise invalid(param.name, f"{value:{shown}} is not in {param.wire_range}")


def check_prompt_logprobs(sampling: SamplingParams, num_prompt_tokens: int) -> None:
    """Limit prompt log probabilities, because all of them are kept until they are read. Raises Rejection."""
    count = (1 + sampling.num_top_prompt_logprobs) * num_prompt_tokens
    if count > MAX_PROMPT_LOGPROBS:
        message = f"{count} for a prompt of {num_prompt_tokens} tokens; at most {MAX_PROMPT_LOGPROBS} are possible"
        raise invalid("prompt_logprobs", message)


def _check_bias(sampling: SamplingParams) -> None:
    if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
        raise invalid("logit_bias", f"has {len(sampling.logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are possible")
    for token, bias in sampling.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid("logit_bias", f"{bias:g} for token {token} is not in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")


def _check_bad_words(sampling: SamplingParams) -> None:
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"has {len(sampling.bad_words)} entries; at most {MAX_BAD_WORDS} are possible")
    if (total := sum(map(len, sampling.bad_words)) // TOKEN_BYTES) > MAX_BAD_WORDS_TOKENS:
        raise invalid("bad_words", f"have {total} tokens in all; at most {MAX_BAD_WORDS_TOKENS} are possible")
    for word in sampling.bad_words:
        if len(word) % TOKEN_BYTES:
            raise invalid("bad_words", "is not packed int32")
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS * TOKEN_BYTES:
            count = len(word) // TOKEN_BYTES
            raise invalid("bad_words", f"one has {count} tokens, 1 to {MAX_BAD_WORD_TOKENS} are possible")


def check_logit_tokens(sampling: SamplingParams, vocab: int) -> None:
    """Check the token ids of parameters that change the logits. Raises Rejection."""
    for token in sampling.logit_bias:
        if token >= vocab:
            raise outside("logit_bias", token, vocab)
    for word in sampling.bad_words:
        check_tokens("bad_words", word, vocab)
    if sampling.allowed_token_ids:
        check_tokens("allowed_token_ids", sampling.allowed_token_ids, vocab)


def check_tokens(name: str, token_ids: bytes, vocab: int) -> None:
    """Check packed int32 token ids; there is at least one. Raises Rejection for an id outside the vocabulary."""
    tokens = np.frombuffer(token_ids, np.uint32)  # a negative id is larger than any vocabulary
    if np.maximum.reduce(tokens) >= vocab:
        raise outside(name, int(tokens.view(np.int32)[tokens >= vocab][0]), vocab)


def outside(name: str, token: int, vocab: int) -> Rejection:
    return invalid(name, f"token id {token} is outside the vocabulary of {vocab}")
