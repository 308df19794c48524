"""A worker without a model that notices every mistake in a plan.

Its tokens are a function of the sequence alone, so the right output of a request is known without any server. Its KV
blocks hold the meaning of a real worker's blocks: for each position, a hash of all tokens up to it. A row that attends
reads its whole table and compares. So a block that was freed too early, shared wrongly or never written is found at
once. No position of a block is written twice while a table contains the block (stricter than invariant 2 of
docs/design.md), unless the position had a draft token that was not accepted.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from paceline.v1.common_pb2 import ModelInfo, PromptLogprobs, SamplingParams
from paceline.v1.worker_pb2 import (
    KeptSequence,
    NewSequence,
    SlotPromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerRegistration,
)
from scheduler_svc.core.requests.beams import BeamSearch

Blocks = dict[int, list[int | None]]

VOCAB = 50_000
EOS = 7
REFUSED = "refused"  # prefix of grammars that are refused


class Corruption(AssertionError):
    """The plan made the worker read KV that is not the sequence's own, or broke the protocol."""


class StepRaised(Exception):
    """A planted fault: the forward pass raised. The worker reports it and registers again."""


class WorkerDied(Exception):
    """A planted fault: the process is gone, without a message."""


def next_token(tokens: list[int], sampling: SamplingParams) -> int:
    """The toy model: any token id from 8 on, or EOS in about one of forty cases. With top_k = n the text repeats
    itself: mostly it is the token n places before."""
    digest = zlib.crc32(np.array([*tokens, sampling.seed & 0x7FFFFFFF], np.int64).tobytes())
    if 0 < sampling.top_k <= len(tokens) and digest % 13:
        return tokens[-sampling.top_k]
    return EOS if digest % 40 == 0 else 8 + digest % (VOCAB - 8)


def toy_logprob(tokens: list[int]) -> float:
    """The log probability of the last token."""
    return -((tokens[-1] * 31 + len(tokens)) % 64) / 8


def toy_candidates(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The most likely next tokens, best first: any token ids from 8 on; one in five lists contains EOS, too."""
    digest = zlib.crc32(np.array(tokens, np.int64).tobytes())
    likely = [8 + (digest + 7919 * i) % (VOCAB - 8) for i in range(count)]
    if count and digest % 5 == 0:
        likely[digest % count] = EOS
    # Sixteenths are exact in any precision.
    return [(token, -(2 * i + 1 + (digest >> i) % 2) / 16) for i, token in enumerate(likely)]


def expected_hypotheses(prompt: list[int], search: BeamSearch) -> list[tuple[list[int], float]]:
    """The result of an undisturbed beam search."""
    while not search.done:
        search.advance([toy_candidates([*prompt, *beam.tokens], search.candidates_needed) for beam in search.live])
    return [(list(found.tokens), found.score) for found in search.best()]


def expected_output(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The output of an undisturbed run."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        tokens.append(next_token(tokens, sampling))
        if tokens[-1] == EOS and not sampling.ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class ToySequence:
    """A sequence in a slot."""

    tokens: list[int]
    num_computed: int
    table: list[int]
    sampling: SamplingParams
    num_prompt: int
    hashes: list[int]  # of every prefix: hashes[i] covers tokens[: i + 1]
    has_sampled: bool = False
    paused: bool = False
    cache_salt: str = ""

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._hash_to(len(self.tokens))

    def _hash_to(self, length: int) -> None:
        while len(self.hashes) < length:
            i = len(self.hashes)
            before = self.hashes[-1] if self.hashes else 0
            self.hashes.append(zlib.crc32(self.tokens[i].to_bytes(4, "little"), before))


class ToyWorker:
    """Executes plans, and raises an error for a wrong plan."""

    def __init__(
        self, *, block_size: int, num_blocks: int, max_num_seqs: int, max_batched_tokens: int, num_host_blocks: int = 0
    ) -> None:
        self.registration = WorkerRegistration(
            name="toy",
            model=ModelInfo(
                name="toy", fingerprint="toy", vocab_size=VOCAB, max_model_len=1 << 20, eos_token_ids=[EOS]
            ),
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            num_host_blocks=num_host_blocks,
            verifies_drafts=True,
        )
        self.block_size = block_size
        self.blocks: Blocks = {b: [None] * block_size for b in range(1, num_blocks + 1)}
        self.host: Blocks = {b: [None] * block_size for b in range(1, num_host_blocks + 1)}
        self.num_computed = 0  # tokens, of all sequences ever
        self.reset()

    def reset(self, keeps_blocks: bool = False) -> None:
        """A new registration: slots are empty. The contents of the blocks become void, or stay valid if the worker
        keeps them."""
        self.step = 0
        self.slots: dict[int, ToySequence] = {}
        self.grammars: dict[int, str] = {}  # prepared grammars
        self._forgets: list[tuple[int, int]] = []  # step, grammar
        if keeps_blocks:
            return
        for block in [*self.blocks.values(), *self.host.values()]:
            block[:] = [None] * self.block_size

    def kept(self) -> list[KeptSequence]:
        """What its blocks hold of the sequences that ran last."""
        return [
            KeptSequence(
                token_ids=np.array(sequence.tokens, np.int32).tobytes(),
                num_computed_tokens=sequence.num_computed,
                block_table=np.array(sequence.table, np.int32).tobytes(),
                cache_salt=sequence.cache_salt,
            )
            for sequence in self.slots.values()
        ]

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises Corruption."""
        self._expect(plan.step == self.step + 1, f"plan {plan.step} after {self.step}")
        self.step = plan.step
        self._copy(self.blocks, plan.swap_out_from, self.host, plan.swap_out_to)
        self._copy(self.host, plan.swap_in_from, self.blocks, plan.swap_in_to)
        self._expect(not set(_ints(plan.copy_from)) & set(_ints(plan.copy_to)), "a block is copied from and to")
        self._copy(self.blocks, plan.copy_from, self.blocks, plan.copy_to)
        for slot in _ints(plan.free_slots):
            self._expect(slot in self.slots, f"slot {slot} freed, but empty")
            del self.slots[slot]
        filled = self._filled()
        for new in plan.new_sequences:
            self._fill_slot(new)
        for slot, block in zip(_ints(plan.grow_slots), _ints(plan.grow_blocks), strict=True):
            self._at(slot, "grown").table.append(block)
        for slot in _ints(plan.hold_slots):
            sequence = self._at(slot, "paused")
            self._expect(sequence.has_sampled and not sequence.paused, f"slot {slot} cannot be paused")
            sequence.paused = True
        for slot in _ints(plan.resume_slots):
            sequence = self._at(slot, "resumed")
            self._expect(sequence.paused, f"slot {slot} is resumed, but not paused")
            sequence.paused = False
        decodes = [slot for slot in sorted(self.slots) if self.slots[slot].has_sampled and not self.slots[slot].paused]
        if plan.skip_decodes:
            decodes = []
        chunks = list(zip(_ints(plan.prefill_slots), _ints(plan.prefill_tokens), strict=True))
        draft_slots, draft_counts = _ints(plan.draft_slots), _ints(plan.draft_counts)
        draft_tokens = iter(_ints(plan.draft_tokens))
        drafts = [list(islice(draft_tokens, count)) for count in draft_counts]
        self._expect([*map(len, drafts)] == draft_counts and not [*draft_tokens], "the draft counts are wrong")
        budget = len(decodes) + sum(tokens for _, tokens in chunks) + len(drafts) + sum(draft_counts)
        self._expect(0 < budget <= self.registration.max_batched_tokens, f"{budget} tokens in a step")
        for slot, _ in chunks:
            self._expect(not self._at(slot, "prefilled").has_sampled, f"slot {slot} has sampled, and prefills")
        self._expect(len(dict(chunks)) == len(chunks), "a slot prefills twice in a step")
        for slot in draft_slots:
            self._expect(self._at(slot, "drafted").paused, f"slot {slot} drafts, but is not held")
        self._expect(len({*draft_slots}) == len(draft_slots), "a slot drafts twice in a step")
        prompts = [shown for slot, tokens in chunks if (shown := self._prompt_logprobs(slot, tokens)) is not None]
        sampled = [self._compute(self.slots[slot], 1, filled) for slot in decodes]
        sampled += [self._compute(self.slots[slot], num_tokens, filled) for slot, num_tokens in chunks]
        tokens = [token for token in sampled if token is not None]
        verified = [self._verify(self.slots[slot], own, filled) for slot, own in zip(draft_slots, drafts, strict=True)]
        self._forget_grammars()
        scored = [slot for slot in [*decodes, *dict(chunks)] if self.slots[slot].sampling.logprobs]
        scores = [self._logprobs(slot) for slot in scored if self.slots[slot].has_sampled]
        return StepResult(
            step=plan.step,
            token_ids=np.array(tokens, np.int32).tobytes(),
            logprobs=scores,
            prompt_logprobs=prompts,
            draft_num_tokens=np.array([*map(len, verified)], np.int32).tobytes(),
            draft_token_ids=np.array([*chain(*verified)], np.int32).tobytes(),
        )

    def _copy(self, source: Blocks, packed_from: bytes, target: Blocks, packed_to: bytes) -> None:
        self._expect(len(set(_ints(packed_to))) * 4 == len(packed_to), "two copies of one list have the same target")
        for i, j in zip(_ints(packed_from), _ints(packed_to), strict=True):
            target[j][:] = source[i]

    def _logprobs(self, slot: int) -> TokenLogprobs:
        """The log probability of the token that the slot has just sampled."""
        sequence = self.slots[slot]
        likely = toy_candidates(sequence.tokens[:-1], sequence.sampling.num_top_logprobs)
        return TokenLogprobs(
            slot=slot,
            logprob=toy_logprob(sequence.tokens),
            top_token_ids=np.array([token for token, _ in likely], np.int32).tobytes(),
            top_logprobs=np.array([logprob for _, logprob in likely], np.float32).tobytes(),
        )

    def _prompt_logprobs(self, slot: int, num_tokens: int) -> SlotPromptLogprobs | None:
        """The log probability of the next token at every position of the chunk that is about to be computed."""
        sequence = self._at(slot, "prefilled")
        first = sequence.num_computed + 1
        end = min(first + num_tokens, sequence.num_prompt)
        if not sequence.sampling.prompt_logprobs or first >= end:
            return None
        logprobs = [toy_logprob(sequence.tokens[: i + 1]) for i in range(first, end)]
        shown = PromptLogprobs(
            start=first,
            logprobs=np.array(logprobs, np.float32).tobytes(),
            ranks=np.ones(len(logprobs), np.int32).tobytes(),
        )
        return SlotPromptLogprobs(slot=slot, logprobs=shown)

    def _at(self, slot: int, what: str) -> ToySequence:
        self._expect(slot in self.slots, f"slot {slot} {what}, but empty")
        return self.slots[slot]

    def _fill_slot(self, new: NewSequence) -> None:
        self._expect(new.slot not in self.slots, f"slot {new.slot} is taken")
        if (grammar := new.sampling.grammar) and self.registration.prepares_grammars:
            self._expect(grammar in self.grammars.values(), f"slot {new.slot}: its grammar is not prepared")
        self._expect(new.slot < self.registration.max_num_seqs, f"slot {new.slot} does not exist")
        sequence = ToySequence(
            [], new.num_cached_tokens, _ints(new.block_table), new.sampling, new.num_prompt_tokens, []
        )
        sequence.cache_salt = new.cache_salt
        for token in _ints(new.token_ids):
            sequence.append(token)
        self._expect(len(set(sequence.table)) == len(sequence.table), "a block stands twice in a table")
        self.slots[new.slot] = sequence

    def prepare_grammar(self, number: int, grammar: str) -> str:
        """Prepare a grammar. Returns why the grammar is refused; empty if it is prepared."""
        if grammar.startswith(REFUSED):
            return grammar
        self.grammars[number] = grammar
        return ""

    def forget_grammar(self, number: int, step: int) -> None:
        """Forget the grammar when the plans up to this step have run: they came before the message."""
        self._forgets.append((step, number))
        self._forget_grammars()

    def _forget_grammars(self) -> None:
        while self._forgets and self._forgets[0][0] <= self.step:
            _, number = self._forgets.pop(0)
            self._expect(number in self.grammars, f"grammar {number} is forgotten, and was not prepared")
            del self.grammars[number]

    def _filled(self) -> dict[int, int]:
        """How many positions of each block are written already, according to the tables. Call this before the new
        sequences get their slots. Another sequence may write their cached tokens only in this step, so these tokens are
        not written yet."""
        filled: dict[int, int] = {}
        for sequence in self.slots.values():
            for i, block in enumerate(sequence.table):
                filled[block] = max(filled.get(block, 0), sequence.num_computed - i * self.block_size)
        return filled

    def _compute(self, sequence: ToySequence, num_tokens: int, filled: dict[int, int]) -> int | None:
        """Write the KV of the next tokens, read all tokens up to them, and sample if the last known token was among
        them."""
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        self._expect(num_tokens > 0 and end <= len(sequence.tokens), f"{num_tokens} tokens from {start}")
        self._attend(sequence, end, filled)
        sequence.num_computed = end
        if end < len(sequence.tokens):
            return None
        token = next_token(sequence.tokens, sequence.sampling)
        sequence.append(token)
        sequence.has_sampled = True
        return token

    def _verify(self, sequence: ToySequence, drafts: list[int], filled: dict[int, int]) -> list[int]:
        """Compute the last token and the drafts after it, and sample after each. Returns the sampled tokens up to the
        first one that is not the next draft."""
        known = len(sequence.tokens)
        self._expect(sequence.num_computed == known - 1, f"{sequence.num_computed} of {known} tokens are computed")
        for token in drafts:
            sequence.append(token)
        self._attend(sequence, known + len(drafts), filled)
        del sequence.tokens[known:], sequence.hashes[known:]
        for draft in [*drafts, None]:
            sequence.append(next_token(sequence.tokens, sequence.sampling))
            if sequence.tokens[-1] != draft:
                break
        sequence.num_computed = len(sequence.tokens) - 1
        return sequence.tokens[known:]

    def _attend(self, sequence: ToySequence, end: int, filled: dict[int, int]) -> None:
        """Write the KV of the tokens up to `end`, and read the KV of all of them."""
        start = sequence.num_computed
        self._expect(end <= len(sequence.table) * self.block_size, f"no block for position {end - 1}")
        for position in range(start, end):
            block, place = sequence.table[position // self.block_size], position % self.block_size
            self._expect(place >= filled.get(block, 0), f"block {block} is written again, at position {place}")
            self.blocks[block][place], filled[block] = sequence.hashes[position], place + 1
        for position in range(end):
            read = self.blocks[sequence.table[position // self.block_size]][position % self.block_size]
            self._expect(read == sequence.hashes[position], f"wrong KV at position {position} of {end}")
        self.num_computed += end - start

    @staticmethod
    def _expect(condition: bool, message: str) -> None:
        if not condition:
            raise Corruption(message)


def _ints(packed: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, np.int32).tolist()
    return numbers
