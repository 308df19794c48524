"""Logits processors: penalties, bias, bans and lists of allowed tokens, for the slots that ask for them.

Penalties and bad words need all tokens of a sequence before its next token is sampled, and the last token may not have
reached the host yet. So their state is on the device, and `record` adds each sampled token there.

- A slot with penalties has a dense row of counts: 4 bytes per token of the vocabulary (0.5 MiB at 128k). A penalty
  reads the row's logits anyway, so reading as many counts is cheap, and recording a token is one addition. A buffer of
  tokens would be smaller for a short sequence, but it would have to become counts at each step.
- A slot with bad words has a row (a tail) with the sequence's last tokens: one token less than the longest possible bad
  word has.

Both start from the tokens with which a sequence begins in a slot. A preempted sequence begins again with all its
tokens, so it gets the same tokens as without the preemption. Other slots have no state, and cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import upload
from gpu_worker.errors import ProtocolViolation
from gpu_worker.sampling.processors import IN_PROMPT, ONCE_IN_OUTPUT, add_bias, allow_only, ban_words, penalise
from paceline.request_fields import PENALTY_NAMES, SAMPLING
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

# The largest number of tokens in a bad word.
MAX_BAD_WORD_TOKENS = 64
_PREFIX = MAX_BAD_WORD_TOKENS - 1
_NO_PENALTIES = tuple(SAMPLING[name].default for name in PENALTY_NAMES)


class RowPool:
    """Rows of one device tensor for slots. The tensor grows with the largest number of rows in use, to `num_slots` rows
    at most."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self.tensor = torch.zeros((0, width), dtype=torch.int32, device=device)
        self._row_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def take(self, slot: int) -> Tensor:
        """A row for the slot, int32 [width], with old contents."""
        if not self._free:
            have = len(self.tensor)
            more = min(have + 1, self._num_slots - have)
            self._free = list(range(have, have + more))[::-1]
            self.tensor = torch.cat((self.tensor, self.tensor.new_zeros((more, self.tensor.shape[1]))))
        row = self._row_of[slot] = self._free.pop()
        return self.tensor[row]

    def release(self, slot: int) -> None:
        """Release the slot's row, if any."""
        if (row := self._row_of.pop(slot, None)) is not None:
            self._free.append(row)

    def rows(self, slots: Sequence[int]) -> Int64s:
        return np.array([self._row_of[slot] for slot in slots], np.int64)


@dataclass(frozen=True, slots=True)
class LogitsOptions:
    """The options of one request, on the host."""

    allowed: Int64s  # empty: any token
    bias_tokens: Int64s
    bias: Float32s
    prefixes: Int64s  # [words, _PREFIX], see ban_words
    last: Int64s  # [words]
    penalties: tuple[float, ...]  # in the order of PENALTY_NAMES

    @property
    def penalises(self) -> bool:
        return self.penalties != _NO_PENALTIES

    @property
    def reads_output(self) -> bool:
        """Whether the result depends on earlier tokens of the output."""
        return self.penalises or bool((self.prefixes >= 0).any())


@dataclass(slots=True)
class BatchLogitsProcessors:
    """The logits processors of a batch, on the device. Parts that no row needs are None."""

    allowed: tuple[Tensor, Tensor, Tensor] | None = None  # rows, owners, tokens: see allow_only
    words: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # rows, rows of the tails, prefixes, last
    tails: Tensor | None = None
    noted_tails: tuple[Tensor, Tensor] | None = None  # rows of the batch, rows of the tails
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens, bias
    penalties: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None  # rows, rows of the counts, strengths by name
    counts: Tensor | None = None

    def apply(self, logits: Tensor) -> None:
        """Change logits float32 [rows, vocab], in the order of sampler.py."""
        if self.allowed is not None:
            allow_only(logits, *self.allowed)
        if self.words is not None and self.tails is not None:
            rows, tail_rows, prefixes, last = self.words
            tails = self.tails[:, _PREFIX - prefixes.shape[1] :].index_select(0, tail_rows)
            ban_words(logits, rows, tails, prefixes, last)
        if self.bias is not None:
            add_bias(logits, *self.bias)
        if self.penalties is not None and self.counts is not None:
            rows, count_rows, strengths = self.penalties
            penalise(logits, rows, self.counts.index_select(0, count_rows), **strengths)

    def record(self, tokens: Tensor) -> None:
        """Add the sampled tokens to the state of their rows. tokens: int64 [rows]."""
        if self.noted_tails is not None and self.tails is not None:
            rows, tail_rows = self.noted_tails
            newest = tokens.index_select(0, rows).to(torch.int32).unsqueeze(-1)
            before = self.tails.index_select(0, tail_rows)[:, 1:]
            self.tails.index_copy_(0, tail_rows, torch.cat((before, newest), dim=-1))
        if self.penalties is not None and self.counts is not None:
            rows, count_rows, *_ = self.penalties
            places = count_rows * self.counts.shape[1] + tokens.index_select(0, rows)
            once = self.counts.new_full((len(places),), ONCE_IN_OUTPUT)
            self.counts.view(-1).index_add_(0, places, once)


@dataclass(slots=True)
class LogitsProcessors:
    """The processors by slot. Used only by the model's thread, with the plans in order."""

    vocab_size: int
    num_slots: int
    device: torch.device
    _of: dict[int, LogitsOptions] = field(init=False, default_factory=dict)
    _counts: RowPool = field(init=False)
    _tails: RowPool = field(init=False)
    # The last result of `of`, and its slots. A steady batch is assembled once.
    _assembled: tuple[bytes, BatchLogitsProcessors | None] = field(init=False, default=(b"", None))

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new link: no slot has a sequence."""
        self._of.clear()
        self._counts = RowPool(self.num_slots, self.vocab_size, self.device)
        self._tails = RowPool(self.num_slots, _PREFIX, self.device)
        self._assembled = (b"", None)

    def apply(self, plan: StepPlan) -> None:
        """Free and add sequences. The plan must be checked before. ProtocolViolation for an invalid token id or length
        of a bad word."""
        if self._of and plan.free_slots:
            for slot in np.frombuffer(plan.free_slots, "<i4").tolist():
                self._free(slot)
        for sequence in plan.new_sequences:
            options = read_logits_options(sequence.sampling, self.vocab_size)
            if options is not None:
                self._add_sequence(sequence, options)

    def of(self, slots: Int64s) -> BatchLogitsProcessors | None:
        """The processors for a batch that samples in these slots; None if no row needs any."""
        if not self._of:
            return None
        key = slots.tobytes()
        if self._assembled[0] != key:
            asking = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._of]
            self._assembled = (key, self._assemble(asking) if asking else None)
        return self._assembled[1]

    def read_output(self, slots: Int64s) -> bool:
        """Whether the processors of one of these slots depend on earlier tokens of the output."""
        return any(slot in self._of and self._of[slot].reads_output for slot in slots.tolist())

    def _free(self, slot: int) -> None:
        if self._of.pop(slot, None) is not None:
            self._counts.release(slot)
            self._tails.release(slot)
            self._assembled = (b"", None)

    def _add_sequence(self, sequence: NewSequence, options: LogitsOptions) -> None:
        slot = sequence.slot
        self._of[slot] = options
        self._assembled = (b"", None)
        if not (options.penalises or len(options.last)):
            return
        tokens = upload(np.frombuffer(sequence.token_ids, "<i4").astype(np.int64), self.device)
        if options.penalises:
            counts = self._counts.take(slot).zero_()
            prompt, output = tokens.tensor_split([sequence.num_prompt_tokens])
            counts.index_fill_(0, prompt, IN_PROMPT)
            counts.index_add_(0, output, counts.new_full((len(output),), ONCE_IN_OUTPUT))
        if len(options.last):
            tail = self._tails.take(slot).fill_(-1)
            ending = tokens[-_PREFIX:]
            tail[_PREFIX - len(ending) :] = ending.to(torch.int32)

    def _assemble(self, asking: list[tuple[int, int]]) -> BatchLogitsProcessors:
        processors = [(row, slot, self._of[slot]) for row, slot in asking]
        batch = BatchLogitsProcessors()
        if allowed := [(row, c.allowed) for row, _, c in processors if len(c.allowed)]:
            rows, tokens = zip(*allowed, strict=True)
            owners = np.repeat(np.arange(len(rows)), [len(t) for t in tokens])
            batch.allowed = self._put(np.array(rows)), self._put(owners), self._put(np.concatenate(tokens))
        if words := [(row, slot, c) for row, slot, c in processors if len(c.last)]:
            rows, slots, chosen = zip(*words, strict=True)
            numbers, tail_rows = [len(c.last) for c in chosen], self._tails.rows(slots)
            prefixes = np.concatenate([c.prefixes for c in chosen])
            longest = int((prefixes >= 0).sum(-1).max())
            batch.words = (
                self._put(np.repeat(rows, numbers)),
                self._put(np.repeat(tail_rows, numbers)),
                self._put(prefixes[:, _PREFIX - longest :]),
                self._put(np.concatenate([c.last for c in chosen])),
            )
            batch.tails, batch.noted_tails = self._tails.tensor, (self._put(np.array(rows)), self._put(tail_rows))
        if biased := [(row, c) for row, _, c in processors if len(c.bias)]:
            rows, chosen = zip(*biased, strict=True)
            batch.bias = (
                self._put(np.repeat(rows, [len(c.bias) for c in chosen])),
                self._put(np.concatenate([c.bias_tokens for c in chosen])),
                upload(np.concatenate([c.bias for c in chosen]), self.device),
            )
        if penalised := [(row, slot, c) for row, slot, c in processors if c.penalises]:
            rows, slots, chosen = zip(*penalised, strict=True)
            strengths = np.array([c.penalties for c in chosen], np.float32).T.copy()
            by_name = dict(zip(PENALTY_NAMES, upload(strengths, self.device), strict=True))
            batch.penalties = self._put(np.array(rows)), self._put(self._counts.rows(slots)), by_name
            batch.counts = self._counts.tensor
        return batch

    def _put(self, array: npt.NDArray[np.integer]) -> Tensor:
        return upload(array, self.device)


def read_logits_options(sampling: SamplingParams, vocab_size: int) -> LogitsOptions | None:
    """The options in the parameters; None if they have no effect. ProtocolViolation for an invalid token id or length
    of a bad word."""
    penalties = tuple(SAMPLING[name].from_wire(getattr(sampling, name)) for name in PENALTY_NAMES)
    if not (penalties != _NO_PENALTIES or sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids):
        return None
    bias = dict(sampling.logit_bias)
    bias_tokens = np.array(list(bias), np.int64)
    allowed = np.unique(np.frombuffer(sampling.allowed_token_ids, "<i4")).astype(np.int64)
    words = [np.frombuffer(word, "<i4") for word in sampling.bad_words]
    for name, tokens in (
        ("allowed_token_ids", allowed),
        ("logit_bias", bias_tokens),
        *(("bad_words", w) for w in words),
    ):
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            raise ProtocolViolation(f"{name}: a token id outside the vocabulary of {vocab_size}")
    prefixes, last = _words(words)
    values = np.array(list(bias.values()), np.float32)
    return LogitsOptions(allowed, bias_tokens, values, prefixes, last, penalties)


def _words(words: list[npt.NDArray[np.int32]]) -> tuple[Int64s, Int64s]:
    """Prefixes [words, _PREFIX] and last tokens [words]."""
    prefixes = np.full((len(words), _PREFIX), -1, np.int64)
    for prefix, word in zip(prefixes, words, strict=True):
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise ProtocolViolation(f"bad_words: {len(word)} tokens in one, 1 to {MAX_BAD_WORD_TOKENS} are possible")
        prefix[_PREFIX - len(word) + 1 :] = word[:-1]
    return prefixes, np.array([word[-1] for word in words], np.int64)
