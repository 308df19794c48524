"""The sequences of a link by slot. Each step plan changes them.

Struct of arrays: a steady decode step touches each array once, for any number of sequences. `tokens` has the token ids
of a slot only until they are computed. The last sampled token stays on the device. `history` has all known tokens, for
grammars and for the next link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import ProtocolViolation
from gpu_worker.sampling.prompt_scores import PromptRows, ScoredChunk
from gpu_worker.sampling.sampler import ColumnsOf, SamplingRows
from gpu_worker.steps.history import SampledSlots, TokenHistory
from gpu_worker.steps.rows import NO_INTS, NO_SLOTS, Bools, Int32s, Int64s, Pairs, StepRows
from paceline.request_fields import SAMPLING
from paceline.v1.worker_pb2 import KeptSequence, NewSequence, StepPlan

BlockCheck = Callable[[Int32s], None]
_COLUMNS = tuple(param for param in SAMPLING.values() if param.processor != "penalty")
_DTYPES = {float: np.float32, int: np.int64}


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """What the worker registered, and what its model allows."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int  # tokens
    block_size: int  # tokens
    num_blocks: int  # usable; ids are 1..num_blocks
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_host_blocks: int = 0  # ids are 1..num_host_blocks


@dataclass(slots=True)
class SlotBuffers:
    """The state of every slot, as arrays with one element per slot. `apply` and `commit` change it once per step, and
    `advance` once for each slot with draft rows."""

    limits: SlotLimits
    occupied: Bools = field(init=False)
    decoding: Bools = field(init=False)  # all tokens but the last are computed, and the last one was sampled here
    paused: Bools = field(init=False)  # a decoding slot that takes part in no step until it is resumed
    num_tokens: Int32s = field(init=False)  # known tokens, including sampled ones
    num_computed: Int32s = field(init=False)  # tokens with KV in the blocks
    num_prompt: Int32s = field(init=False)
    num_blocks: Int32s = field(init=False)
    block_table: Int32s = field(init=False)  # [slots, blocks]
    sampling_columns: dict[str, npt.NDArray[Any]] = field(init=False)  # see SamplingRows
    seed: npt.NDArray[np.uint64] = field(init=False)
    min_tokens: Int64s = field(init=False)
    num_top: dict[int, int] = field(init=False)  # by slot that reports log probabilities: likeliest tokens to report
    banned: dict[int, Int64s] = field(init=False)  # by slot: tokens that min_tokens bans
    tokens: dict[int, Int32s] = field(init=False)  # by prefilling slot: all known tokens
    scored_prompts: dict[int, int] = field(init=False)  # by prefilling slot: likeliest tokens to report
    request_ids: dict[int, str] = field(init=False)
    cache_salts: dict[int, str] = field(init=False)  # by slot with a salt
    history: TokenHistory = field(init=False)
    table_blocks: int = field(init=False)  # entries of the block tables of all sequences in slots
    _last_step: int = field(init=False)
    _granted: list[Int32s] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new link: no slot has a sequence."""
        slots = self.limits.max_num_seqs
        longest_blocks = -(-self.limits.max_model_len // self.limits.block_size)
        self.occupied, self.decoding, self.paused = (np.zeros(slots, np.bool_) for _ in range(3))
        self.num_tokens, self.num_computed = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        self.num_prompt, self.num_blocks = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        self.block_table = np.zeros((slots, min(longest_blocks, self.limits.num_blocks)), np.int32)
        self.sampling_columns = {param.name: np.full(slots, param.default, _DTYPES[param.kind]) for param in _COLUMNS}
        self.min_tokens = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.uint64)
        self.num_top, self.banned, self.tokens, self.scored_prompts = {}, {}, {}, {}
        self.request_ids, self.cache_salts = {}, {}
        self.history = TokenHistory(slots, self.limits.max_model_len)
        self.table_blocks = self._last_step = 0
        self._granted = []

    # ── applying a plan ───────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan) -> StepRows:
        """Apply the plan, in the order that worker.proto gives, and return the rows of its forward pass.

        Raises ProtocolViolation for an invalid plan. Then only reset() makes the state valid again.
        """
        self._begin(plan.step)
        self._granted = []
        moves = self._moves(plan)
        if plan.free_slots:
            self._free(unpack(plan.free_slots, "free_slots"))
        for sequence in plan.new_sequences:
            self._add_sequence(sequence)
        if plan.grow_slots or plan.grow_blocks:
            self._grow(unpack(plan.grow_slots, "grow_slots"), unpack(plan.grow_blocks, "grow_blocks"))
        if plan.hold_slots:
            self._pause(unpack(plan.hold_slots, "hold_slots"), True)
        if plan.resume_slots:
            self._pause(unpack(plan.resume_slots, "resume_slots"), False)
        return self._rows(
            NO_SLOTS if plan.skip_decodes else np.flatnonzero(self.decoding & ~self.paused),
            (unpack(plan.prefill_slots, "prefill_slots"), unpack(plan.prefill_tokens, "prefill_tokens")),
            self._drafts(plan),
            moves,
        )

    def _begin(self, step: int) -> None:
        if step != self._last_step + 1:
            raise ProtocolViolation(f"step {step} follows step {self._last_step}")
        self._last_step = step

    def repeat(self, plan: StepPlan, rows: StepRows) -> None:
        """apply() and commit() of a plan that changes nothing but block tables, for these decodes of the last plan.

        Raises ProtocolViolation as apply() does."""
        self._begin(plan.step)
        self._granted = []
        if plan.grow_slots:
            self._grow(unpack(plan.grow_slots, "grow_slots"), unpack(plan.grow_blocks, "grow_blocks"))
        ends = self.num_computed[rows.slots] + 1
        self._check_room(rows.slots, ends)
        self.num_computed[rows.slots] = ends
        self.num_tokens[rows.slots] += 1

    def _moves(self, plan: StepPlan) -> tuple[Pairs, Pairs, Pairs]:
        """Swaps out, swaps in, copies."""
        swaps = plan.swap_out_from or plan.swap_out_to or plan.swap_in_from or plan.swap_in_to
        if not (swaps or plan.copy_from or plan.copy_to):
            return _NO_MOVES
        device, host = self._check_blocks, self._check_host_blocks
        out = _pairs("swap_out", plan.swap_out_from, plan.swap_out_to, device, host)
        back = _pairs("swap_in", plan.swap_in_from, plan.swap_in_to, host, device)
        copies = _pairs("copy", plan.copy_from, plan.copy_to, device, device)
        if np.isin(*copies).any():
            raise ProtocolViolation("copy_to names a block of copy_from")
        return out, back, copies

    def _free(self, slots: Int32s) -> None:
        self._check_occupied(slots, "free_slots")
        if len(np.unique(slots)) != len(slots):
            raise ProtocolViolation("free_slots names a slot twice")
        self.table_blocks -= int(self.num_blocks[slots].sum())
        self.occupied[slots] = self.decoding[slots] = self.paused[slots] = False
        self.history.free(slots)
        for slot in slots.tolist():
            self.request_ids.pop(slot, None)
            self.cache_salts.pop(slot, None)
            self.tokens.pop(slot, None)
            self.scored_prompts.pop(slot, None)
            self.banned.pop(slot, None)
            self.num_top.pop(slot, None)

    def _pause(self, slots: Int32s, paused: bool) -> None:
        what = "hold_slots" if paused else "resume_slots"
        self._check_occupied(slots, what)
        if (
            not self.decoding[slots].all()
            or (self.paused[slots] == paused).any()
            or len(np.unique(slots)) != len(slots)
        ):
            state = "not paused" if paused else "paused"
            raise ProtocolViolation(
                f"{what} {slots.tolist()}: each slot must be decoding, {state}, and named only once"
            )
        self.paused[slots] = paused

    def _add_sequence(self, sequence: NewSequence) -> None:
        slot, limits = sequence.slot, self.limits
        if slot >= limits.max_num_seqs:
            raise ProtocolViolation(f"new sequence in slot {slot} of {limits.max_num_seqs}")
        if self.occupied[slot]:
            raise ProtocolViolation(f"new sequence in slot {slot}, which is taken by {self.request_ids.get(slot)!r}")
        tokens = unpack(sequence.token_ids, "token_ids")
        blocks = unpack(sequence.block_table, "block_table")
        self._check_sequence(sequence, tokens, blocks)
        self.occupied[slot] = True
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = sequence.num_cached_tokens
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.num_blocks[slot] = len(blocks)
        self.block_table[slot, : len(blocks)] = blocks
        self.table_blocks += len(blocks)
        self._granted.append(blocks[-(-sequence.num_cached_tokens // limits.block_size) :])
        self.tokens[slot] = tokens
        self.request_ids[slot] = sequence.request_id
        if sequence.cache_salt:
            self.cache_salts[slot] = sequence.cache_salt
        self.history.begin(slot, tokens)
        sampling = sequence.sampling
        for param in _COLUMNS:
            self.sampling_columns[param.name][slot] = param.from_wire(getattr(sampling, param.name))
        self.seed[slot] = sampling.seed
        self.min_tokens[slot] = sampling.min_tokens
        if sampling.logprobs:
            self.num_top[slot] = sampling.num_top_logprobs
        if sampling.prompt_logprobs:
            self.scored_prompts[slot] = sampling.num_top_prompt_logprobs
        if sampling.min_tokens:
            ends = {*sampling.stop_token_ids, *limits.eos_token_ids}
            self.banned[slot] = np.array(sorted(token for token in ends if token < limits.vocab_size), np.int64)

    def _check_sequence(self, sequence: NewSequence, tokens: Int32s, blocks: Int32s) -> None:
        limits, slot = self.limits, sequence.slot
        count = len(tokens)
        if not 0 < sequence.num_prompt_tokens <= count or count > limits.max_model_len:
            raise ProtocolViolation(
                f"slot {slot}: {count} tokens (prompt: {sequence.num_prompt_tokens}), limit {limits.max_model_len}"
            )
        if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
            raise ProtocolViolation(f"slot {slot}: a token id outside the vocabulary of {limits.vocab_size}")
        if sequence.num_cached_tokens >= count or sequence.num_cached_tokens > len(blocks) * limits.block_size:
            raise ProtocolViolation(
                f"slot {slot}: {sequence.num_cached_tokens} cached tokens of {count} in {len(blocks)} blocks"
            )
        if len(blocks) > self.block_table.shape[1]:
            raise ProtocolViolation(f"slot {slot}: {len(blocks)} blocks are more than a sequence can have")
        if not 0 <= sequence.sampling.temperature < np.inf:
            raise ProtocolViolation(f"slot {slot}: temperature {sequence.sampling.temperature}")
        self._check_blocks(blocks)

    def _grow(self, slots: Int32s, blocks: Int32s) -> None:
        if len(slots) != len(blocks):
            raise ProtocolViolation(f"{len(slots)} grow_slots and {len(blocks)} grow_blocks")
        self._check_occupied(slots, "grow_slots")
        self._check_blocks(blocks)
        places = self.num_blocks[slots]
        if len(set(slots.tolist())) < len(slots):
            places += _earlier(slots)  # the blocks of a slot that occurs several times take successive places
        if places.max() >= self.block_table.shape[1]:
            raise ProtocolViolation(f"slot {slots[places.argmax()]}: its block table grows past the longest sequence")
        self.block_table[slots, places] = blocks
        np.add.at(self.num_blocks, slots, 1)
        self.table_blocks += len(blocks)
        self._granted.append(blocks)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rows(
        self, decodes: Int64s, chunks: Pairs, drafted: tuple[Int32s, Int32s, Int32s], moves: tuple[Pairs, Pairs, Pairs]
    ) -> StepRows:
        prefills, prefill_tokens = chunks
        if len(prefills) != len(prefill_tokens):
            raise ProtocolViolation(f"{len(prefills)} prefill_slots and {len(prefill_tokens)} prefill_tokens")
        if len(prefills):
            self._check_prefills(prefills, prefill_tokens)
        drafting, draft_counts, draft_tokens = drafted
        slots, counts = decodes, np.ones(len(decodes), np.int32)
        if len(prefills) or len(drafting):
            slots = np.concatenate((decodes, prefills, drafting))
            counts = np.concatenate((counts, prefill_tokens, draft_counts + 1))
        starts = self.num_computed[slots]
        ends = starts + counts
        if counts.sum() > self.limits.max_batched_tokens:
            raise ProtocolViolation(f"{counts.sum()} rows in a step of at most {self.limits.max_batched_tokens}")
        self._check_room(slots, ends)
        samples = ends == self.num_tokens[slots]
        samples[len(slots) - len(drafting) :] = False
        granted = np.concatenate(self._granted) if self._granted else NO_INTS
        return StepRows(slots, len(decodes), starts, counts, samples, granted, *moves, len(drafting), draft_tokens)

    def _check_room(self, slots: npt.NDArray[np.integer], ends: npt.NDArray[np.integer]) -> None:
        """ends: tokens of each slot after the step."""
        short = ends > self.num_blocks[slots] * self.limits.block_size
        if short.any():
            i = int(short.argmax())
            raise ProtocolViolation(
                f"slot {slots[i]}: {self.num_blocks[slots[i]]} blocks are too few for {ends[i]} tokens"
            )
        too_long = ends > self.limits.max_model_len
        if too_long.any():
            raise ProtocolViolation(f"slot {slots[too_long.argmax()]}: longer than {self.limits.max_model_len} tokens")

    def _check_prefills(self, slots: Int32s, counts: Int32s) -> None:
        self._check_occupied(slots, "prefill_slots")
        if len(np.unique(slots)) != len(slots) or self.decoding[slots].any():
            raise ProtocolViolation("prefill_slots names a slot twice, or a decoding slot")
        if (counts < 1).any() or (counts > self.num_tokens[slots] - self.num_computed[slots]).any():
            raise ProtocolViolation("prefill_tokens: each count must be from 1 to the slot's uncomputed tokens")

    def _drafts(self, plan: StepPlan) -> tuple[Int32s, Int32s, Int32s]:
        """The slots with draft rows, how many draft tokens each has, and these tokens."""
        if not (plan.draft_slots or plan.draft_counts or plan.draft_tokens):
            return NO_INTS, NO_INTS, NO_INTS
        slots, counts = unpack(plan.draft_slots, "draft_slots"), unpack(plan.draft_counts, "draft_counts")
        tokens = unpack(plan.draft_tokens, "draft_tokens")
        self._check_occupied(slots, "draft_slots")
        if len(np.unique(slots)) != len(slots) or not self.paused[slots].all():
            raise ProtocolViolation(f"draft_slots {slots.tolist()}: each slot must be held, and named only once")
        if (self.history.num_known[slots] != self.num_tokens[slots]).any():
            raise ProtocolViolation(f"draft_slots names a slot without a known last token: {slots.tolist()}")
        if len(slots) != len(counts) or (counts < 0).any() or counts.sum() != len(tokens):
            raise ProtocolViolation(
                f"{len(slots)} draft_slots, draft_counts {counts.tolist()} and {len(tokens)} draft_tokens"
            )
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.limits.vocab_size):
            raise ProtocolViolation(f"draft_tokens: a token id outside the vocabulary of {self.limits.vocab_size}")
        return slots, counts, tokens

    def prefill_tokens(self, rows: StepRows) -> Int64s:
        """The input token ids of the prefill rows and the draft rows, concatenated."""
        chunk = slice(rows.num_decodes, rows.drafted.start)
        inputs = [
            self.tokens[slot][start : start + count]
            for slot, start, count in zip(
                rows.slots[chunk].tolist(), rows.starts[chunk].tolist(), rows.counts[chunk].tolist(), strict=True
            )
        ]
        for slot, drafts in zip(rows.slots[rows.drafted].tolist(), rows.drafts(), strict=True):
            inputs += self.history.of(slot)[-1:], drafts
        return np.concatenate(inputs).astype(np.int64)

    def commit(self, rows: StepRows) -> None:
        """The step is queued: its rows count as computed, and each sampling slot has one token more. Draft rows do not
        count before advance()."""
        end = rows.drafted.start
        self.num_computed[rows.slots[:end]] += rows.counts[:end]
        sampled = rows.sampled_slots
        self.num_tokens[sampled] += 1
        for slot in sampled[rows.num_decodes :].tolist():
            self.decoding[slot] = True
            del self.tokens[slot]
            self.scored_prompts.pop(slot, None)

    def advance(self, slot: int, tokens: Int32s) -> None:
        """Draft rows of the slot have sampled these tokens. With no token, they have failed."""
        self.num_computed[slot] += len(tokens)
        self.num_tokens[slot] += len(tokens)
        self.history.extend(slot, tokens)

    def sampling(self, rows: StepRows) -> SampledSlots:
        """The slots that sample in the step, for `history`. Call before commit()."""
        slots = rows.sampled_slots
        return self.history.sampling(slots, self.num_tokens[slots])

    def kept(self, max_bytes: int) -> list[KeptSequence]:
        """The sequences in slots, with their tokens and block tables, up to `max_bytes` in all. Call this when all
        launched steps have run and `history` has their tokens."""
        kept, num_bytes = [], 0
        for slot in np.flatnonzero(self.occupied).tolist():
            known = self.history.of(slot)
            sequence = KeptSequence(
                token_ids=known.tobytes(),
                num_computed_tokens=min(int(self.num_computed[slot]), len(known)),
                block_table=self.block_table[slot, : self.num_blocks[slot]].tobytes(),
                cache_salt=self.cache_salts.get(slot, ""),
            )
            num_bytes += sequence.ByteSize()
            if num_bytes > max_bytes:
                break
            if len(known):
                kept.append(sequence)
        return kept

    def prompt_rows(self, rows: StepRows) -> PromptRows | None:
        """Rows that score the next prompt token; None if there are none."""
        if not self.scored_prompts:
            return None
        firsts = np.cumsum(rows.counts) - rows.counts
        where, chunks = [], []
        for i in range(rows.num_decodes, len(rows.slots)):
            slot, start = int(rows.slots[i]), int(rows.starts[i])
            count = min(int(rows.counts[i]), int(self.num_prompt[slot]) - 1 - start)
            if slot in self.scored_prompts and count > 0:
                where.append(firsts[i] + np.arange(count))
                tokens = self.tokens[slot][start + 1 : start + 1 + count]
                chunks.append(ScoredChunk(slot, start + 1, tokens, self.scored_prompts[slot]))
        return PromptRows(np.concatenate(where), chunks) if chunks else None

    def sampling_rows(self, rows: StepRows) -> SamplingRows:
        """Parameters of the sampling rows, in row order, without draft rows. Call before commit()."""
        slots = rows.sampled_slots
        return self.sampling_at(slots, self.num_tokens[slots].astype(np.int64))

    def sampling_at(self, slots: Int64s, positions: Int64s) -> SamplingRows:
        """Parameters of rows that sample the tokens at these positions."""
        banned_rows, banned_tokens = self._banned(slots, positions) if self.banned else (NO_SLOTS, NO_SLOTS)
        scored, num_top = self._scored(slots) if self.num_top else (NO_SLOTS, NO_SLOTS)
        return SamplingRows(
            columns=ColumnsOf(self.sampling_columns, slots),
            seed=self.seed[slots],
            position=positions,
            banned_rows=banned_rows,
            banned_tokens=banned_tokens,
            scored=scored,
            num_top=num_top,
        )

    def _scored(self, slots: Int64s) -> tuple[Int64s, Int64s]:
        """The rows that report log probabilities, and how many of the likeliest tokens each reports."""
        rows = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self.num_top]
        scored = np.array([row for row, _ in rows], np.int64)
        return scored, np.array([self.num_top[slot] for _, slot in rows], np.int64)

    def _banned(self, slots: Int64s, positions: Int64s) -> tuple[Int64s, Int64s]:
        which = np.flatnonzero(positions - self.num_prompt[slots] < self.min_tokens[slots])
        tokens = [self.banned[int(slots[i])] for i in which]
        if not tokens:
            return NO_SLOTS, NO_SLOTS
        return np.repeat(which, [len(t) for t in tokens]), np.concatenate(tokens)

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_occupied(self, slots: Int32s, what: str) -> None:
        known = (slots >= 0) & (slots < self.limits.max_num_seqs)
        if not known.all() or not self.occupied[slots].all():
            raise ProtocolViolation(f"{what} names a slot that holds no sequence: {slots.tolist()}")

    def _check_blocks(self, blocks: Int32s) -> None:
        if len(blocks) and (blocks.min() < 1 or blocks.max() > self.limits.num_blocks):
            raise ProtocolViolation(f"a block id outside 1..{self.limits.num_blocks}: {blocks.tolist()}")

    def _check_host_blocks(self, blocks: Int32s) -> None:
        if len(blocks) and (blocks.min() < 1 or blocks.max() > self.limits.num_host_blocks):
            raise ProtocolViolation(f"a host block id outside 1..{self.limits.num_host_blocks}: {blocks.tolist()}")


_NO_MOVES = ((NO_INTS, NO_INTS),) * 3


def _pairs(what: str, packed_from: bytes, packed_to: bytes, check_from: BlockCheck, check_to: BlockCheck) -> Pairs:
    """Sources and targets of block copies. No block is written twice."""
    sources, targets = unpack(packed_from, f"{what}_from"), unpack(packed_to, f"{what}_to")
    if len(sources) != len(targets):
        raise ProtocolViolation(f"{len(sources)} blocks in {what}_from and {len(targets)} in {what}_to")
    if len(np.unique(targets)) != len(targets):
        raise ProtocolViolation(f"{what}_to names a block twice")
    check_from(sources)
    check_to(targets)
    return sources, targets


def _earlier(slots: Int32s) -> Int64s:
    """How often each slot occurs before its place in the array."""
    order = np.argsort(slots, kind="stable")
    first = np.searchsorted(slots[order], slots[order])
    counts = np.empty(len(slots), np.int64)
    counts[order] = np.arange(len(slots)) - first
    return counts


def unpack(packed: bytes, what: str) -> Int32s:
    """Decode packed little-endian int32."""
    if len(packed) % 4:
        raise ProtocolViolation(f"{what}: {len(packed)} bytes are not packed int32")
    return np.frombuffer(packed, "<i4")
