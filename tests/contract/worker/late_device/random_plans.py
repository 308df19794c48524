"""Random step plans with everything that moves KV: chunks, forks with copied blocks, swaps, held slots, reused slots.

A plan does not depend on results: every sequence has a fixed number of tokens to sample, and tokens that a sequence
continues from are random. So the same plans run on any worker, with any number of steps in flight."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_worker.steps.slots import SlotLimits
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from tests.unit.worker.driver import pack

LONGEST_PROMPT, MOST_OUTPUTS = 60, 20


@dataclass(slots=True)
class _Planned:
    """A sequence in a slot, or, with host_blocks, a sequence that is swapped out."""

    num_known: int
    outputs_left: int
    sampling: SamplingParams
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    decodes: bool = False
    held: bool = False


class RandomPlans:
    """Makes plans one after the other. `moves` counts what they contain."""

    def __init__(self, limits: SlotLimits, seed: int, samplings: Sequence[SamplingParams]) -> None:
        self.moves: Counter[str] = Counter()
        self._limits, self._rng, self._samplings = limits, random.Random(seed), samplings
        self._running: dict[int, _Planned] = {}
        self._swapped: list[_Planned] = []
        self._owners: Counter[int] = Counter()  # of device blocks
        self._free_host = list(range(1, limits.num_host_blocks + 1))
        self._step, self._num_made = 0, 0

    def make(self, count: int) -> list[StepPlan]:
        return [self._next() for _ in range(count)]

    def _next(self) -> StepPlan:
        self._step += 1
        plan, freed_host = StepPlan(step=self._step), list[int]()
        self._leave(plan)
        free_slots = [slot for slot in range(self._limits.max_num_seqs) if slot not in self._running]
        for slot in self._rng.sample(free_slots, self._rng.randint(0, min(3, len(free_slots)))):
            freed_host += self._arrive(plan, slot)
        self._hold(plan)
        self._compute(plan)
        self._free_host += freed_host
        return plan

    def _leave(self, plan: StepPlan) -> None:
        """Some sequences end early, and some are swapped out. Their blocks may be granted again by the same plan."""
        freed, out, into = list[int](), list[int](), list[int]()
        for slot, planned in list(self._running.items()):
            is_swapped = planned.computed > 0 and planned.outputs_left > 0 and self._rng.random() < 0.08
            kept = planned.blocks[: -(-planned.computed // self._limits.block_size)]
            if is_swapped and len(kept) <= len(self._free_host):
                planned.host_blocks = [self._free_host.pop() for _ in kept]
                out, into = out + kept, into + planned.host_blocks
                self._swapped.append(planned)
                self.moves["swapped out"] += len(kept)
            elif planned.outputs_left > 0 and self._rng.random() > 0.02:
                continue
            freed.append(slot)
            del self._running[slot]
            self._owners.subtract(planned.blocks)
            planned.blocks, planned.decodes, planned.held = [], False, False
        plan.free_slots, plan.swap_out_from, plan.swap_out_to = pack(freed), pack(out), pack(into)

    def _arrive(self, plan: StepPlan, slot: int) -> list[int]:
        """A new sequence, a fork of a running one, or one that was swapped out. Returns the host blocks to free."""
        source = self._rng.choice([None, *self._running.values()])
        if self._swapped and self._rng.random() < 0.5:
            return self._come_back(plan, slot)
        arriving = {sequence.slot for sequence in plan.new_sequences}
        is_fork = source is not None and source.computed > 0 and self._rng.random() < 0.5
        if is_fork and all(source is not self._running[other] for other in arriving):
            assert source is not None
            self._fork(plan, slot, source)
            return []
        planned = _Planned(self._rng.randint(1, LONGEST_PROMPT), self._rng.randint(1, MOST_OUTPUTS), self._sampling())
        if self._extend(planned, planned.num_known):
            self._begin(plan, slot, planned)
        return []

    def _come_back(self, plan: StepPlan, slot: int) -> list[int]:
        planned = self._swapped[-1]
        if not self._extend(planned, planned.num_known):
            return []
        self._swapped.pop()
        host, planned.host_blocks = planned.host_blocks, []
        plan.swap_in_from += pack(host)
        plan.swap_in_to += pack(planned.blocks[: len(host)])
        self._begin(plan, slot, planned)
        self.moves["swapped in"] += len(host)
        return host

    def _fork(self, plan: StepPlan, slot: int, source: _Planned) -> None:
        """Shares the whole blocks of the source, and copies the block that the source may still write."""
        whole, rest = divmod(source.computed, self._limits.block_size)
        fork = _Planned(
            source.computed + self._rng.randint(1, 20), self._rng.randint(1, MOST_OUTPUTS), self._sampling()
        )
        fork.computed, fork.blocks = source.computed, source.blocks[:whole]
        self._owners.update(fork.blocks)
        if not self._extend(fork, fork.num_known):
            self._owners.subtract(fork.blocks)
            return
        if rest:
            plan.copy_from += pack([source.blocks[whole]])
            plan.copy_to += pack([fork.blocks[whole]])
            self.moves["copied"] += 1
        self._begin(plan, slot, fork)
        self.moves["forked"] += 1

    def _begin(self, plan: StepPlan, slot: int, planned: _Planned) -> None:
        self._num_made += 1
        self._running[slot] = planned
        tokens = [self._rng.randrange(self._limits.vocab_size) for _ in range(planned.num_known)]
        plan.new_sequences.append(
            NewSequence(
                slot=slot, token_ids=pack(tokens), num_prompt_tokens=len(tokens), num_cached_tokens=planned.computed,
                block_table=pack(planned.blocks), sampling=planned.sampling, request_id=f"r{self._num_made}",
            )
        )  # fmt: skip

    def _hold(self, plan: StepPlan) -> None:
        changed: dict[bool, list[int]] = {True: [], False: []}
        for slot, planned in self._running.items():
            if planned.decodes and self._rng.random() < (0.4 if planned.held else 0.05):
                planned.held = not planned.held
                changed[planned.held].append(slot)
        plan.hold_slots, plan.resume_slots = pack(changed[True]), pack(changed[False])

    def _compute(self, plan: StepPlan) -> None:
        """Decodes, then chunks of random sizes. The decodes wait if there are too few blocks for all of them."""
        active = {slot: one for slot, one in sorted(self._running.items()) if one.decodes and not one.held}
        decodes = list(active)
        missing = sum(self._num_missing(planned, planned.num_known) for planned in active.values())
        if missing > len(self._free_blocks()) or self._rng.random() < 0.1:
            plan.skip_decodes, decodes = True, []
        grown: dict[int, list[int]] = {slot: self._grow(slot, 0) for slot in decodes}
        for slot in decodes:
            grown[slot] += self._grow(slot, self._rng.choice([0, 0, 0, 2 * self._limits.block_size]))
            self._running[slot].computed += 1
        self.moves["grown by several"] += any(len(blocks) > 1 for blocks in grown.values())
        plan.grow_slots = pack([slot for slot, blocks in grown.items() for _ in blocks])
        plan.grow_blocks = pack([block for blocks in grown.values() for block in blocks])
        chunks = self._chunks(self._limits.max_batched_tokens - len(decodes))
        plan.prefill_slots, plan.prefill_tokens = pack(list(chunks)), pack(list(chunks.values()))
        self.moves["decodes only"] += bool(decodes) and not chunks
        self.moves["mixed"] += bool(decodes) and bool(chunks)
        for slot in [*decodes, *chunks]:
            planned = self._running[slot]
            if planned.computed == planned.num_known:
                planned.num_known += 1
                planned.outputs_left -= 1
                planned.decodes = True

    def _chunks(self, budget_tokens: int) -> dict[int, int]:
        if self._rng.random() < 0.25:
            return {}
        chunks = {}
        for slot in self._rng.sample(list(self._running), len(self._running)):
            planned = self._running[slot]
            left = 0 if planned.decodes else planned.num_known - planned.computed
            if left and budget_tokens:
                most = min(left, budget_tokens)
                chunks[slot] = self._rng.choice([most, self._rng.randint(1, most)])
                planned.computed += chunks[slot]
                budget_tokens -= chunks[slot]
        return chunks

    def _grow(self, slot: int, more: int) -> list[int]:
        """Blocks for the known tokens and `more` tokens."""
        planned = self._running[slot]
        before = len(planned.blocks)
        self._extend(planned, planned.num_known + more)
        return planned.blocks[before:]

    def _extend(self, planned: _Planned, num_tokens: int) -> bool:
        """Grants blocks for that many tokens, or none."""
        free, count = self._free_blocks(), self._num_missing(planned, num_tokens)
        if count > len(free):
            return False
        granted = self._rng.sample(free, count)
        self._owners.update(granted)
        planned.blocks += granted
        return True

    def _num_missing(self, planned: _Planned, num_tokens: int) -> int:
        return max(-(-num_tokens // self._limits.block_size) - len(planned.blocks), 0)

    def _free_blocks(self) -> list[int]:
        return [block for block in range(1, self._limits.num_blocks + 1) if not self._owners[block]]

    def _sampling(self) -> SamplingParams:
        return self._rng.choice(self._samplings)
