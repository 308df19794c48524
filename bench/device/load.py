"""Plans a whole run in advance: each request has a fixed number of tokens to compute and to sample. So the planner
needs no results, and several steps can be in flight, as with a scheduler."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gpu_worker.steps.slots import SlotLimits
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan

GREEDY = SamplingParams(top_p=1.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=50, ignore_eos=True, seed=1)


class NoRoom(Exception):
    """The pool has too few blocks for the load."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request of the load."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt; their KV is leftover content of the blocks
    output_tokens: int


@dataclass(slots=True)
class _Running:
    number: int
    request: LoadRequest
    computed: int
    sampled: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and what the measurement needs to know of it."""

    plan: StepPlan
    placed: list[int]  # numbers of the requests
    sampled: list[int]  # in row order
    rows: int
    decodes_only: bool


class Load:
    """Makes the plans of a run, in order."""

    def __init__(
        self, limits: SlotLimits, requests: list[LoadRequest], sampling: SamplingParams = GREEDY, seed: int = 0
    ) -> None:
        self._limits, self._sampling = limits, sampling
        self._rng = random.Random(seed)
        self._waiting = deque(enumerate(requests))
        self._running: dict[int, _Running] = {}  # by slot
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._free_blocks = list(range(1, limits.num_blocks + 1))
        self._rng.shuffle(self._free_blocks)
        self._ended: list[int] = []
        self._step = 0

    def steps(self, concurrency: int) -> Iterator[PlannedStep]:
        """Plans until every request has ended; at most `concurrency` requests run at the same time. The last plan only
        frees slots. Raises NoRoom."""
        while self._waiting or self._running or self._ended:
            yield self._next(concurrency)

    def _next(self, concurrency: int) -> PlannedStep:
        self._step += 1
        plan = StepPlan(step=self._step, free_slots=_pack(self._ended))
        self._free_slots += self._ended
        self._ended = []
        placed = []
        while self._waiting and len(self._running) < concurrency:
            placed.append(self._waiting[0][0])
            plan.new_sequences.append(self._new_sequence())
        decodes = sorted(slot for slot, r in self._running.items() if r.sampled)
        grown = [(slot, block) for slot in decodes for block in self._grow(self._running[slot])]
        plan.grow_slots, plan.grow_blocks = _pack([s for s, _ in grown]), _pack([b for _, b in grown])
        chunks = self._chunks(self._limits.max_batched_tokens - len(decodes))
        plan.prefill_slots, plan.prefill_tokens = _pack(list(chunks)), _pack(list(chunks.values()))
        for slot, count in chunks.items():
            self._running[slot].computed += count
        samples = decodes + [s for s in chunks if self._running[s].computed == self._running[s].request.prompt_tokens]
        numbers = [self._running[slot].number for slot in samples]
        for slot in samples:
            self._sample(slot)
        return PlannedStep(plan, placed, numbers, len(decodes) + sum(chunks.values()), bool(decodes) and not chunks)

    def _new_sequence(self) -> NewSequence:
        number, request = self._waiting.popleft()
        slot = self._free_slots.pop()
        running = self._running[slot] = _Running(number, request, request.cached_tokens)
        self._extend(running, request.prompt_tokens)
        tokens = np.random.default_rng(number).integers(0, self._limits.vocab_size, request.prompt_tokens)
        return NewSequence(
            slot=slot,
            token_ids=tokens.astype("<i4").tobytes(),
            num_prompt_tokens=request.prompt_tokens,
            num_cached_tokens=request.cached_tokens,
            block_table=_pack(running.blocks),
            sampling=self._sampling,
            request_id=str(number),
        )

    def _grow(self, running: _Running) -> list[int]:
        return self._extend(running, running.request.prompt_tokens + running.sampled)

    def _extend(self, running: _Running, num_tokens: int) -> list[int]:
        grown = []
        while len(running.blocks) * self._limits.block_size < num_tokens:
            if not self._free_blocks:
                raise NoRoom
            grown.append(self._free_blocks.pop())
            running.blocks.append(grown[-1])
        return grown

    def _chunks(self, budget_tokens: int) -> dict[int, int]:
        """The number of prompt tokens that this step computes, by slot."""
        chunks = {}
        for slot, running in self._running.items():
            left = running.request.prompt_tokens - running.computed
            if left > 0 and budget_tokens > 0:
                chunks[slot] = min(left, budget_tokens)
                budget_tokens -= chunks[slot]
        return chunks

    def _sample(self, slot: int) -> None:
        running = self._running[slot]
        running.sampled += 1
        if running.sampled == running.request.output_tokens:
            del self._running[slot]
            self._free_blocks += running.blocks
            self._ended.append(slot)


def _pack(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
