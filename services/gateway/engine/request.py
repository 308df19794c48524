"""Checks and completes what a client asks for. All APIs that generate text make their jobs for the scheduler here."""

from __future__ import annotations

import asyncio
import os
import re
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from paceline.request_fields import METADATA, MIN_FLOAT32, PENALTY_NAMES
from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.live_request import NO_METADATA
from services.gateway.engine.logprobs import Echo
from services.gateway.engine.sampling import FieldNames, SamplingChoices, check_range, refuse_for_beams, sampling_params
from services.gateway.engine.truncation import Truncation
from services.gateway.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, Gone, invalid
from services.gateway.grammars.checks import GrammarChecks
from services.gateway.grammars.structure import Structure
from services.gateway.parsing.reply import ReplyFormat
from services.gateway.text.chat_values import NO_EXTRAS, ChatExtras, strings
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.id_tokenizer import IdTokenizer
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.tokenizer import TextTokenizer

T = TypeVar("T")

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_SAMPLES = 64  # per prompt
# The scheduler's limits. The gateway checks them too, because submissions of several requests share one message.
MAX_RETENTION_RANGES = 64
MAX_LENGTH_PENALTY = 10.0
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
# Longer texts are encoded off the event loop. The tokenizer releases the GIL.
_INLINE_CHARS = 4096
# Limit of the sampling options of all sequences of a request together, because each sequence has a copy. Making copies
# of this size takes 40 ms of the event loop.
_MAX_COPIED_BYTES = 4 * 2**20
_USER_DIGITS = 32  # hexadecimal digits of the hash in the tenant of a long `user`
_SHORTENED_USER = re.compile(
    rf".{{{METADATA['tenant'].max_chars - 1 - _USER_DIGITS}}}-[0-9a-f]{{{_USER_DIGITS}}}", re.DOTALL
)
_BIAS_BYTES = 48  # an entry of logit_bias takes as long to copy as this many bytes


@dataclass(slots=True)
class GenerateJob:
    """One sequence to generate, with every field set. `arrival_s` is a time of time.perf_counter."""

    request_id: str
    endpoint: str
    prompt_ids: array[int]  # a list would take ten times the memory while the request lives
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    final_tokens: frozenset[int]
    token_bytes: Callable[[int], bytes]  # the bytes of a token
    shown_bytes: Callable[[int], bytes]  # what a token adds to the text: nothing if it is a hidden special token
    new_detokenizer: Callable[[], Detokenizer]  # for output after the prompt
    arrival_s: float
    include_stop: bool = False  # whether the text contains the stop string or token
    logprobs: bool = False  # whether the client gets log probabilities
    prompt_logprobs: bool = False
    echo: Echo | None = None
    reply: ReplyFormat | None = None  # how to find reasoning and tool calls in the text; None: all of it is content
    metadata: inference_pb2.Submission = field(default_factory=inference_pb2.Submission)
    sample: int = 0  # index among the samples of one prompt
    beam: inference_pb2.BeamOptions | None = None
    delivered: tuple[int, ...] = ()  # output of another run that the client already has


class RequestBuilder:
    """Turns prompts and sampling choices into jobs.

    `worker_model` gives the ModelInfo of the running workers, if known. It has precedence over config.json.
    `max_model_len`: an upper limit of the context length that either of them gives.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | IdTokenizer,
        files: ModelFiles,
        *,
        worker_model: Callable[[], common_pb2.ModelInfo | None] = lambda: None,
        max_model_len: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._files = files
        self._worker_model = worker_model
        self._cap = max_model_len
        # One per core. More threads would only slow down the event loop.
        self._threads = asyncio.Semaphore(os.cpu_count() or 1)
        self._checks: GrammarChecks | None = None  # made for the first structured output

    @property
    def max_model_len(self) -> int:
        """The largest number of prompt and output tokens of one sequence."""
        worker = self._worker_model()
        limit = worker.max_model_len if worker is not None and worker.max_model_len else self._files.max_model_len
        return min(limit, self._cap) if self._cap else limit

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        worker = self._worker_model()
        return worker.vocab_size if worker is not None and worker.vocab_size else self._files.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, unless the request ignores them."""
        worker = self._worker_model()
        return frozenset(worker.eos_token_ids) if worker is not None else self._files.eos_token_ids

    # -- prompts -----------------------------------------------------------------------------------

    async def encode_text(
        self,
        text: str,
        names: FieldNames,
        *,
        add_special_tokens: bool = True,
        of_chars: int = 0,
        truncation: Truncation | None = None,
        gone: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Token ids of a plain prompt. `of_chars`: characters of all prompts of the request, if it has several.

        Raises ApiError 400. A long prompt waits for a free thread. Raises Gone if `gone()` is true after this wait.
        """
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if truncation is None:
            self._check_chars(len(text), names)
        elif truncation.keeps_added:
            encode = partial(
                self.tokenizer.encode_part,
                text,
                truncation.num_tokens,
                cut_off=truncation.side or "left",
                add_special_tokens=add_special_tokens,
            )
        is_short = max(len(text), of_chars) <= _INLINE_CHARS
        ids = encode() if is_short else await self._in_thread(encode, gone)
        if text and not ids and truncation is not None:
            message = f"truncate_prompt_tokens: {truncation.num_tokens} is too few for the tokens that frame a text"
            raise invalid("truncate_prompt_tokens", message)
        return ids if truncation is None else list(truncation.cut(ids))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: FieldNames,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        extras: ChatExtras = NO_EXTRAS,
        truncation: Truncation | None = None,
        gone: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Token ids of a chat. Raises ApiError 400, and Gone like encode_text."""
        if truncation is None:
            self._check_chars(sum(len(message["content"]) for message in messages), names)
        encode = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            extras=extras,
        )
        is_short = _num_chars(messages, variables, extras) <= _INLINE_CHARS
        ids = encode() if is_short else await self._in_thread(encode, gone)
        return ids if truncation is None else list(truncation.cut(ids))

    async def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        extras: ChatExtras = NO_EXTRAS,
        gone: Callable[[], bool] = lambda: False,
    ) -> str:
        """A chat as the template writes it. Raises what encode_chat raises."""
        render = partial(
            self.tokenizer.render_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            extras=extras,
        )
        is_short = _num_chars(messages, variables, extras) <= _INLINE_CHARS
        return "".join(render() if is_short else await self._in_thread(render, gone))

    def check_token_ids(self, token_ids: Sequence[int], field_name: str) -> array[int]:
        """The ids, packed, if all are in the vocabulary. Raises ApiError 400."""
        vocab_size = self.vocab_size
        try:
            packed = token_ids if isinstance(token_ids, array) else array("i", token_ids)
            view = np.frombuffer(packed, np.int32) if packed else np.zeros(1, np.int32)
            are_known = bool(view.min() >= 0 and view.max() < vocab_size)
        except OverflowError:
            are_known = False
        if not are_known:
            bad = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise invalid(field_name, f"token id {bad} is out of vocabulary: the model has {vocab_size} tokens")
        return packed

    def prompt_end(self, token_ids: Sequence[int], count: int) -> str:
        """The text of the last `count` tokens of a prompt, with special tokens."""
        return self.tokenizer.decode(list(token_ids[-count:]), skip_special_tokens=False)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises ApiError 400."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def grammar(
        self,
        structure: Structure | None,
        tenant: str = "",
        gone: Callable[[], bool] = lambda: False,
        num_sequences: int = 1,
    ) -> str:
        """The grammar of a structured output; "" if `structure` is None. Raises what GrammarChecks.grammar raises."""
        if structure is None:
            return ""
        if isinstance(self.tokenizer, IdTokenizer):
            raise invalid(structure.field, f"{structure.field}: this model has no tokenizer, so no structured outputs")
        if self._checks is None:
            path = self._files.folder / "tokenizer.json"
            self._checks = GrammarChecks(path, self.vocab_size, self.eos_token_ids)
        return await self._checks.grammar(structure, tenant, gone, num_sequences)

    async def close(self) -> None:
        """End the processes that try grammars."""
        if self._checks is not None:
            await self._checks.close()

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, gone: Callable[[], bool]) -> str:
        """The text of a prompt. Raises Gone like encode_text."""
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return decode() if len(token_ids) <= _INLINE_CHARS else await self._in_thread(decode, gone)

    async def offsets(self, text: str, *, add_special_tokens: bool, gone: Callable[[], bool]) -> list[int]:
        """Where the tokens of encode_text begin in the text, in characters. Raises Gone like encode_text."""
        find = partial(self.tokenizer.offsets, text, add_special_tokens=add_special_tokens)
        return find() if len(text) <= _INLINE_CHARS else await self._in_thread(find, gone)

    async def _in_thread(self, encode: Callable[[], T], gone: Callable[[], bool]) -> T:
        await self._threads.acquire()
        if gone():
            self._threads.release()
            raise Gone
        # A cancelled caller leaves its thread running with the text. The semaphore is released when the thread ends.
        encoding = asyncio.create_task(asyncio.to_thread(encode))
        encoding.add_done_callback(lambda _: self._threads.release())
        return await asyncio.shield(encoding)

    def _check_chars(self, num_chars: int, names: FieldNames) -> None:
        # The length of the longest token gives a lower bound for the number of tokens. So a text with too many
        # characters is refused without encoding.
        least = num_chars // self.tokenizer.longest_token_chars
        if least > self.max_model_len:
            raise too_long(names.prompt, f"at least {least}", self.max_model_len)

    # -- jobs --------------------------------------------------------------------------------------

    def job(
        self,
        token_ids: Sequence[int],
        choices: SamplingChoices,
        *,
        request_id: str,
        endpoint: str,
        names: FieldNames,
        default_max_tokens: int | None = None,
        arrival_s: float | None = None,
        metadata: inference_pb2.Submission = NO_METADATA,
        reply: ReplyFormat | None = None,
    ) -> GenerateJob:
        """Check everything and fill in the defaults. `token_ids`: the prompt. Raises ApiError 400.

        `default_max_tokens` None: as many as fit into the context.
        """
        prompt_ids = array("i", token_ids)
        room = self.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise invalid(names.prompt, "the prompt is empty: it needs at least one token")
        if room < 1:
            raise too_long(names.prompt, str(len(prompt_ids)), self.max_model_len)
        max_tokens = choices.max_tokens
        if max_tokens is None:
            max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
            if choices.min_tokens is not None:
                max_tokens = min(max(max_tokens, choices.min_tokens), room)
        check_range(names.of("max_tokens"), max_tokens, 1, 2**31 - 1)
        if max_tokens > self.max_model_len:
            name = names.of("max_tokens")
            message = (
                f"{context_text(self.max_model_len)} However, {name} is {max_tokens}. Ask for fewer output tokens."
            )
            raise invalid(name, message, code=CONTEXT_LENGTH_EXCEEDED)
        max_tokens = min(max_tokens, room)  # as vLLM: the output ends where the context does
        min_tokens = choices.min_tokens or 0
        if not 0 <= min_tokens <= max_tokens:
            raise invalid(names.of("min_tokens"), f"min_tokens must be between 0 and max_tokens ({max_tokens})")
        sampling = sampling_params(choices, self._files, self, names)
        sampling.max_tokens, sampling.min_tokens = max_tokens, min_tokens
        return GenerateJob(
            request_id=request_id,
            endpoint=endpoint,
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop=_stop_strings(choices, names),
            final_tokens=frozenset(sampling.stop_token_ids)
            | (frozenset() if choices.ignore_eos else self.eos_token_ids),
            new_detokenizer=partial(
                self.tokenizer.detokenizer,
                prompt_ids,
                skip_special_tokens=choices.skip_special_tokens,
                with_markers=reply is not None,
            ),
            token_bytes=self.tokenizer.token_bytes,
            shown_bytes=partial(self.tokenizer.token_bytes, skip_special_tokens=choices.skip_special_tokens),
            include_stop=choices.include_stop_str_in_output,
            logprobs=choices.logprobs is not None,
            prompt_logprobs=choices.prompt_logprobs is not None,
            arrival_s=time.perf_counter() if arrival_s is None else arrival_s,
            metadata=metadata,
            reply=reply,
        )

    def samples(self, job: GenerateJob, n: int, best_of: int) -> list[GenerateJob]:
        """`best_of` copies of the job, each with its own seed. If `n` is less, the copies ask for log probabilities,
        by which the best `n` are chosen."""
        jobs = [job]
        job.sampling.logprobs |= best_of > n
        for i in range(1, best_of):
            sampling = common_pb2.SamplingParams()
            sampling.CopyFrom(job.sampling)
            sampling.seed = (job.sampling.seed + i) % 2**64
            sampling.prompt_logprobs = False  # the first sample brings them
            jobs.append(replace(job, request_id=f"{job.request_id}.{i}", sampling=sampling, sample=i))
        return jobs


def _num_chars(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None, extras: ChatExtras) -> int:
    """About how many characters the template writes."""
    if extras.template is not None:
        return _INLINE_CHARS + 1  # a client's template may take any time
    return 32 * len(messages) + sum(map(len, strings([messages, variables, extras.tools, extras.documents])))


def check_copies(sampling: common_pb2.SamplingParams, count: int) -> None:
    """Check the size of the sampling options of `count` sequences. Raises ApiError 400."""
    if count * (sampling.ByteSize() + _BIAS_BYTES * len(sampling.logit_bias)) > _MAX_COPIED_BYTES:
        raise invalid(
            "n",
            f"n: all prompts together ask for {count} sequences. Each gets a copy of logit_bias, bad_words, "
            f"allowed_token_ids and the grammar, and all copies may take at most {_MAX_COPIED_BYTES >> 20} MiB; "
            "send several requests",
        )


def check_samples(n: int | None, best_of: int | None, stream: bool) -> tuple[int, int]:
    """How many samples of a prompt to answer with, and how many to generate. Raises ApiError 400."""
    n = 1 if n is None else n
    check_range("n", n, 1, MAX_SAMPLES)
    best_of = n if best_of is None else best_of
    check_range("best_of", best_of, 1, MAX_SAMPLES)
    if best_of < n:
        raise invalid("best_of", f"best_of must be at least n ({n}), not {best_of}")
    if best_of > n and stream:
        message = f"best_of must be n ({n}) with stream, because the best samples are known only at the end"
        raise invalid("best_of", message)
    return n, best_of


def check_beam(
    choices: SamplingChoices, width: int, num_return: int, length_penalty: float, early_stopping: bool | str
) -> inference_pb2.BeamOptions:
    """Options of a beam search, which has no sampling and no stop strings. Raises ApiError 400."""
    refuse_for_beams(choices)
    check_range("length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    kinds = {False: 0, True: inference_pb2.EARLY_STOPPING_FIRST, "never": inference_pb2.EARLY_STOPPING_NEVER}
    if early_stopping not in kinds:
        raise invalid("early_stopping", f'early_stopping must be true, false or "never", not {early_stopping!r}')
    return inference_pb2.BeamOptions(
        width=width,
        num_return=num_return,
        length_penalty=length_penalty,
        early_stopping=inference_pb2.EarlyStopping.ValueType(kinds[early_stopping]),
    )


def make_search(job: GenerateJob, options: inference_pb2.BeamOptions) -> None:
    """Turn the job into a beam search. It ranks by the model's own probabilities, so the model's default penalties do
    not apply. Raises ApiError 400 if the job has a grammar."""
    if job.sampling.grammar:
        raise invalid("use_beam_search", "a beam search knows no structured outputs")
    job.beam = options
    for name in PENALTY_NAMES:
        setattr(job.sampling, name, 0.0)


def check_metadata(
    values: Mapping[str, Any], cache_retention: Sequence[common_pb2.RetentionRange] = ()
) -> inference_pb2.Submission:
    """A submission that holds only metadata. `values`: of the fields in METADATA; None takes the default. Raises
    ApiError 400."""
    metadata = inference_pb2.Submission()
    for name, declared in METADATA.items():
        if (value := values[name]) is None:
            continue
        if declared.kind is str:
            if len(value) > declared.max_chars:
                message = f"{name} has {len(value)} characters; at most {declared.max_chars} are possible"
                raise invalid(name, message)
        elif not abs(value) <= MAX_FLOAT32:  # the messages have 32-bit floats
            raise invalid(name, f"{name} must be a finite number of 32 bits, not {value:g}")
        elif declared.above_zero:
            if value <= 0:
                raise invalid(name, f"{name} must be above 0, not {value:g}")
            value = max(value, MIN_FLOAT32)  # 0 in the message: not given
        setattr(metadata, name, value)
    if len(cache_retention) > MAX_RETENTION_RANGES:
        message = f"cache_retention has {len(cache_retention)} ranges; at most {MAX_RETENTION_RANGES} are possible"
        raise invalid("cache_retention", message)
    metadata.cache_retention.extend(cache_retention)  # the scheduler checks the contents
    return metadata


def tenant_of_user(user: str) -> str:
    """The tenant of an end user (OpenAI's `user`): the user's name, if it is not too long for a tenant. Otherwise the
    beginning of the name and 128 bits of its SHA-256, so that two users never share a tenant."""
    most = METADATA["tenant"].max_chars
    # A name of the shortened form is shortened, too: otherwise a user could take another user's tenant as a name.
    if len(user) <= most and _SHORTENED_USER.fullmatch(user) is None:
        return user
    return f"{user[: most - 1 - _USER_DIGITS]}-{sha256(user.encode()).hexdigest()[:_USER_DIGITS]}"


def context_text(max_model_len: int) -> str:
    """How every error about the context begins: LiteLLM and others recognise these errors by OpenAI's words."""
    return f"This model's maximum context length is {max_model_len} tokens."


def too_long(param: str, num_tokens: str, max_model_len: int) -> ApiError:
    """The error for a prompt that leaves no position for an output token."""
    full = num_tokens == str(max_model_len)
    excess = "leaves no room for an output token" if full else "exceeds this limit even without any output tokens"
    message = (
        f"{context_text(max_model_len)} However, your prompt contains {num_tokens} input tokens, which {excess}. "
        "Please reduce the length of the input prompt."
    )
    return invalid(param, message, code=CONTEXT_LENGTH_EXCEEDED)


def _stop_strings(choices: SamplingChoices, names: FieldNames) -> tuple[str, ...]:
    name = names.of("stop")
    if len(choices.stop) > MAX_STOP_STRINGS:
        raise invalid(name, f"at most {MAX_STOP_STRINGS} stop strings are possible, not {len(choices.stop)}")
    for stop in choices.stop:
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            raise invalid(name, f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters")
    return tuple(choices.stop)
