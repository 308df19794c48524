"""What the scheduler knows of one worker: its slots, its pool, the plans in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.v1.worker_pb2 import StepPlan, WorkerRegistration
from scheduler_svc.core.calendar import Calendar
from scheduler_svc.core.policy import PoolView
from scheduler_svc.core.request import Request
from scheduler_svc.core.slots import Slots, SlotTable

# A decoding row costs a step about as much as so many prefill tokens; it spreads equal requests evenly.
ROW_COST_TOKENS = 16


@dataclass(slots=True)
class Prefill:
    """A running sequence whose known tokens are not all planned yet."""

    slot: int
    num_tokens: int  # known when it was admitted
    num_planned: int  # of these, computed once the plans in flight have run

    @property
    def remaining_tokens(self) -> int:
        return self.num_tokens - self.num_planned


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill row of a step: after it, `num_computed` of `num_tokens` known tokens are computed."""

    slot: int
    generation: int
    num_computed: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.num_computed == self.num_tokens


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """What a plan asked for, kept until its result comes back."""

    step: int
    decode_step: int
    rows: Slots
    generations: npt.NDArray[np.int64]
    chunks: tuple[Chunk, ...]
    num_sampled: int


@dataclass(slots=True)
class Draft:
    """A plan whose cache exchange is on its way."""

    worker: int
    growth: list[tuple[int, int]]  # (slot, generation), one block each
    admissions: list[Request]
    orphans: list[tuple[int, int]] = field(default_factory=list)  # (sequence, index) when the worker is lost meanwhile


@dataclass(slots=True, eq=False)
class Worker:
    id: int
    registration: WorkerRegistration
    window: int
    slots: SlotTable
    last_heard_s: float
    available_blocks: int
    steps_sent: int = 0
    decode_step: int = 0  # the next one
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    running: dict[int, Request] = field(default_factory=dict)  # by slot, in order of admission
    prefills: dict[int, Prefill] = field(default_factory=dict)  # by slot, in order of admission
    finishing: set[int] = field(default_factory=set)  # their last token is in flight; the worker has been told
    frees: list[int] = field(default_factory=list)  # slots the worker has not been told to free yet
    growth: Calendar = field(default_factory=Calendar)
    last_steps: Calendar = field(default_factory=Calendar)
    draft: Draft | None = None
    draining: bool = False
    released: bool = False
    just_preempted: bool = False
    binding_tokens: int = 0  # load of the requests that the draft binds

    @property
    def num_blocks(self) -> int:
        return self.registration.num_blocks

    @property
    def block_size(self) -> int:
        return self.registration.block_size

    @property
    def has_credit(self) -> bool:
        return len(self.in_flight) < self.window

    @property
    def pool(self) -> PoolView:
        return PoolView(self.num_blocks, self.available_blocks, len(self.running))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, request: Request) -> bool:
        """The last token of a sequence is never computed, so it needs no room."""
        return self.blocks_for(request.max_total_tokens - 1) <= self.num_blocks

    def need_blocks(self, request: Request) -> int:
        """Blocks that admitting the request takes from the pool."""
        return self.blocks_for(request.num_tokens) - request.live_tokens(self.id) // self.block_size

    @property
    def load_tokens(self) -> int:
        """A rough measure of how long a new prefill would wait here: prefill ahead of it, and decoding rows."""
        prefill = sum(prefill.remaining_tokens for prefill in self.prefills.values())
        return prefill + self.binding_tokens + ROW_COST_TOKENS * len(self.running)

    def growing_slots(self) -> list[tuple[int, int]]:
        """Slots that need one more block before the next decode step."""
        slots = self.slots
        due = self.growth.due(self.decode_step)
        return [(slot, gen) for slot, gen in due if slots.generation[slot] == gen and slots.decoding[slot]]

    def begin_decoding(self, slot: int, num_tokens: int, max_total_tokens: int) -> None:
        """From the next decode step on; `num_tokens` counts the token that is being sampled now."""
        step, generation = self.decode_step, int(self.slots.generation[slot])
        self.slots.start_decoding(slot, num_tokens, step)
        # At step t the sequence computes position base + t - 1 and needs room for base + t tokens.
        base = num_tokens - step
        self.growth.add(int(self.slots.capacity[slot]) - base + 1, slot, generation)
        self.last_steps.add(max_total_tokens - 1 - base, slot, generation)

    def grow(self, slot: int, generation: int) -> None:
        """The slot got the block it needed for the next decode step."""
        self.slots.capacity[slot] += self.block_size
        self.growth.add(self.decode_step + self.block_size, slot, generation)

    def finish_sending(self, slot: int) -> None:
        """The last token of the slot is in flight: it takes part in no later plan."""
        self.slots.stop_decoding(slot)
        self.finishing.add(slot)
        self.frees.append(slot)

    def vacate(self, slot: int) -> Request:
        """The slot's sequence is over here, for whatever reason; what is in flight for it will be dropped."""
        request = self.running.pop(slot)
        self.prefills.pop(slot, None)
        if slot in self.finishing:
            self.finishing.remove(slot)
        else:
            self.frees.append(slot)
        self.slots.release(slot)
        request.worker, request.slot = 0, -1
        return request


def new_plan(worker: Worker) -> StepPlan:
    worker.steps_sent += 1
    plan = StepPlan(step=worker.steps_sent)
    if worker.frees:
        plan.free_slots = np.array(worker.frees, np.int32).tobytes()
        worker.frees.clear()
    return plan
