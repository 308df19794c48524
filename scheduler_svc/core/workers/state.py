"""What the scheduler knows of one worker: its slots, its pool, the plans in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.v1.worker_pb2 import GrammarOrders, KeptSequence, WorkerRegistration, WorkerServiceLinkResponse
from scheduler_svc.core.arrays import Slots, packed
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.adapters import Adapters
from scheduler_svc.core.workers.grammars import WorkerGrammars
from scheduler_svc.core.workers.progress import WorkerProgress
from scheduler_svc.core.workers.slots import SlotLedger
from scheduler_svc.core.workers.step_time import StepTimeFit
from scheduler_svc.core.workers.step_timers import StepTimers
from scheduler_svc.core.workers.steps import PendingStep, Prefill, StepInFlight
from scheduler_svc.core.workers.swap_space import SwapSpace


@dataclass(slots=True, eq=False)
class WorkerState:
    id: int
    registration: WorkerRegistration
    window: int
    slots: SlotLedger
    available_blocks: int
    prefix_caching: bool = True
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    step_fit: StepTimeFit = field(default_factory=StepTimeFit)
    # sequences that the worker kept from an earlier link, until the cache is told
    kept: list[KeptSequence] = field(default_factory=list)
    steps_sent: int = 0
    decode_step: int = 0  # number of the next decode step
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    running: dict[int, Request] = field(default_factory=dict)  # by slot, in order of admission
    prefills: dict[int, Prefill] = field(default_factory=dict)  # by slot, in order of admission
    finishing: set[int] = field(default_factory=set)  # slots with their last token in flight; to be freed by a plan
    frees: list[int] = field(default_factory=list)  # slots that the worker has not been told to free yet
    last_steps: StepTimers = field(default_factory=StepTimers)
    pending_step: PendingStep | None = None
    draining: bool = False
    released: bool = False
    preempted: list[Request] = field(default_factory=list)  # while the next step was being scheduled
    num_pauses: int = 0  # pauses by the capacity policy since the worker last sampled a token
    knows_cache: bool = False  # the cache has answered an exchange that the worker waited for, since its last step
    asked_for_pins: bool = False  # the cache was asked to give up pins since the worker last ran a sequence
    # decoding sequences that the current step leaves out: tokens by slot
    held: dict[int, int] = field(default_factory=dict)
    parked: dict[int, Request] = field(default_factory=dict)  # beams that keep their blocks here, by arrival index
    host: SwapSpace = field(default_factory=SwapSpace)
    num_departed: int = 0  # sequences that ever left the worker
    num_further: int = 0  # running sequences with Request.is_further_sequence
    _refused: set[int] = field(default_factory=set)  # by arrival index
    _refused_at: int = 0  # num_departed at the refusals
    allocating_tokens: int = 0  # uncached tokens of the requests that the pending step admits
    # Copied from the registration, because a message's fields are slow to read.
    num_blocks: int = field(init=False)
    block_size: int = field(init=False)
    max_batched_tokens: int = field(init=False)
    pool_tokens: int = field(init=False)
    incarnation: str = field(init=False)
    eos_token_ids: tuple[int, ...] = field(init=False)
    adapters: Adapters = field(init=False)
    grammars: WorkerGrammars = field(init=False)

    def __post_init__(self) -> None:
        self.num_blocks = self.registration.num_blocks
        self.block_size = self.registration.block_size
        self.max_batched_tokens = self.registration.max_batched_tokens
        self.pool_tokens = self.num_blocks * self.block_size
        self.incarnation = self.registration.incarnation
        self.eos_token_ids = tuple(self.registration.model.eos_token_ids)
        self.adapters = Adapters(self.registration.max_loras)
        self.grammars = WorkerGrammars(self.registration.prepares_grammars)

    @property
    def has_credit(self) -> bool:
        return len(self.in_flight) < self.window

    @property
    def num_decoding(self) -> int:
        """Decoding sequences, held ones included."""
        return len(self.slots.decode_rows()) + len(self.held)

    @property
    def bound(self) -> list[Request]:
        """Running requests, and those that the pending step admits."""
        admissions = self.pending_step.decision.admissions if self.pending_step else []
        return [*self.running.values(), *(a.request for a in admissions if a.request.phase is Phase.ALLOCATING)]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def refuse(self, request: Request) -> None:
        """A policy had no room for the request here, though there seemed to be room. See has_refused()."""
        if self._refused_at != self.num_departed:
            self._refused_at = self.num_departed
            self._refused.clear()
        self._refused.add(request.arrival_index)

    def has_refused(self, request: Request) -> bool:
        """Whether the worker refused the request and no sequence has left since, so that it would be refused again."""
        return request.arrival_index in self._refused and self._refused_at == self.num_departed

    @property
    def free_slots(self) -> int:
        """Free slots, without those that the pending step takes."""
        return self.slots.num_free - (0 if self.pending_step is None else len(self.pending_step.decision.admissions))

    @property
    def free_blocks(self) -> int:
        """Available blocks, without those that the pending step takes. Blocks of cached prefixes that the pending step
        reuses are not subtracted."""
        if self.pending_step is None:
            return self.available_blocks
        growth, admissions = self.pending_step.decision.growth, self.pending_step.decision.admissions
        return self.available_blocks - len(growth) - sum(self.blocks_for(one.num_new_tokens) for one in admissions)

    def can_ever_hold(self, request: Request) -> bool:
        """Whether the request can fit an empty pool. The last token of a sequence is never computed, so it needs no
        room. An adapter needs a worker that serves adapters."""
        serves = not request.lora or self.registration.max_loras > 0
        return serves and request.max_total_tokens - 1 <= self.pool_tokens

    def has_grammar(self, request: Request) -> bool:
        """Whether the worker has prepared the request's grammar, or the request has none."""
        return not request.grammar or self.grammars.has(request.grammar)

    def want_grammar(self, request: Request, *, early: bool = False) -> None:
        """Ask the worker to prepare the request's grammar if the worker lacks it. `early` as in
        WorkerGrammars.want()."""
        if request.grammar:
            self.grammars.want(request.grammar, early=early)

    def grammar_orders(self) -> GrammarOrders:
        """The open grammar orders for the worker."""
        return self.grammars.take_orders({one.grammar for one in (*self.bound, *self.host.swapped.values())})

    def need_blocks(self, request: Request) -> int:
        """Blocks that admitting the whole request takes from the pool."""
        return self.blocks_for(request.num_tokens) - request.referenced_tokens(self.id) // self.block_size

    def num_tokens(self, slot: int) -> int:
        """Tokens of the slot's sequence after the steps in flight."""
        if (prefill := self.prefills.get(slot)) is not None:
            return prefill.num_tokens
        return self.held.get(slot) or int(self.slots.base[slot]) + self.decode_step

    def num_computed_tokens(self, slot: int) -> int:
        """Of the known tokens of the slot's request, those that are computed after the steps in flight. The last token
        may still be uncomputed."""
        if (prefill := self.prefills.get(slot)) is not None:
            return prefill.num_planned
        num_known = self.running[slot].num_tokens
        return num_known if slot in self.finishing else min(num_known, self.num_tokens(slot) - 1)

    def remaining_new_tokens(self) -> npt.NDArray[np.int64]:
        """For each running sequence: tokens that it may still generate, without those in flight. [running]"""
        slots = np.fromiter(self.running, np.int64, len(self.running))
        tokens = self.slots.base[slots] + self.decode_step
        for i, slot in enumerate(slots.tolist() if self.prefills or self.held or self.finishing else ()):
            if slot in self.finishing:
                tokens[i] = self.slots.max_total[slot]
            elif slot in self.prefills or slot in self.held:
                tokens[i] = self.num_tokens(slot)
        left: npt.NDArray[np.int64] = np.maximum(self.slots.max_total[slots] - tokens, 0)
        return left

    def promised_blocks(self) -> int:
        """Blocks that the running sequences still take if they generate as many tokens as they may."""
        slots = np.fromiter(self.running, np.int64, len(self.running))
        total_blocks = -(-self.slots.max_total[slots] // self.block_size)
        return int(np.maximum(total_blocks - self.slots.capacity[slots] // self.block_size, 0).sum())

    @property
    def queued_prefill_tokens(self) -> int:
        """Uncached prompt tokens of bound requests that no plan computes yet."""
        return self.allocating_tokens + sum(prefill.remaining_tokens for prefill in self.prefills.values())

    @property
    def num_rows(self) -> int:
        """Running sequences, and those that the pending step admits."""
        return len(self.running) + (len(self.pending_step.decision.admissions) if self.pending_step else 0)

    @property
    def context_tokens(self) -> int:
        """Known tokens of these sequences: what a step attends to that runs all of them."""
        rows = self.slots.decode_rows()
        tokens = rows.base_tokens + len(rows) * self.decode_step + sum(self.held.values())
        tokens += sum(prefill.num_tokens for prefill in self.prefills.values())
        return tokens + (
            sum(one.request.num_tokens for one in self.pending_step.decision.admissions) if self.pending_step else 0
        )

    @property
    def may_grow(self) -> bool:
        return len(self.growing_slots()) > 0

    def growing_slots(self) -> Slots:
        """Slots that need one more block before all of them decode again."""
        slots = self.slots
        due = slots.block_boundaries.due(self.decode_step, slots.base, slots.capacity)
        if not self.held:
            return due
        held = [slot for slot, num_tokens in self.held.items() if self.slots.capacity[slot] < num_tokens]
        return np.concatenate((due, np.array(held, np.intp)))

    @property
    def may_lack_blocks(self) -> bool:
        """Whether the next step could need more blocks for running sequences than were available at the last
        exchange."""
        missing = len(self.growing_slots())
        for slot, prefill in self.prefills.items():
            end = prefill.num_planned + min(prefill.remaining_tokens, self.max_batched_tokens)
            missing += max(0, self.blocks_for(end) - int(self.slots.capacity[slot]) // self.block_size)
        return missing > self.available_blocks

    def begin_decoding(self, slot: int, num_tokens: int) -> None:
        """The slot decodes from the next decode step on. `num_tokens` includes the token that is being sampled now."""
        slots, step = self.slots, self.decode_step
        slots.start_decoding(slot, num_tokens, step)
        last_step = int(slots.max_total[slot]) - 1 - num_tokens + step
        self.last_steps.add(last_step, [slot], [int(slots.decode_epoch[slot])])

    def grow(self, slots: Slots) -> None:
        """Each slot gets one block (a slot in prefill may occur several times). A decoding slot needs its block for the
        next decode step."""
        if self.slots.block_boundaries.grown(slots, self.decode_step):
            self.slots.capacity[slots] += self.block_size
        else:
            np.add.at(self.slots.capacity, slots, self.block_size)

    def hold(self, slot: int) -> None:
        """Leave the sequence out of every step until it is resumed."""
        self.held[slot] = self.num_tokens(slot)
        self.slots.stop_decoding(slot, self.decode_step)

    def resume(self, slot: int) -> None:
        self.begin_decoding(slot, self.held.pop(slot))

    def in_steps(self, first: int, last: int) -> tuple[list[Request], int, int]:
        """For the steps in flight from `first` to `last`: the requests with rows in them that still run here, the
        number of sequences in all their rows, and the number of steps."""
        steps = [step for step in self.in_flight if first <= step.step <= last]
        pairs = {pair for step in steps for pair in step.slots_and_generations()}
        generation = self.slots.generation
        return [self.running[slot] for slot, gen in sorted(pairs) if generation[slot] == gen], len(pairs), len(steps)

    def finish_sending(self, slot: int) -> None:
        """The last token of the slot is in flight: no later plan contains the slot."""
        self.slots.stop_decoding(slot, self.decode_step)
        self.finishing.add(slot)
        self.frees.append(slot)

    def forget_cache(self) -> None:
        """The cache is gone. Blocks that it granted still hold their KV."""
        self.available_blocks = 0
        self.knows_cache = False
        self.host.forget_cache()

    def drop_pending_step(self) -> list[Request]:
        """Drop the pending step, if there is one. If the cache still answers it, no plan is made of it. Returns the
        live requests that it admits."""
        pending_step, self.pending_step = self.pending_step, None
        if pending_step is None:
            return []
        self.allocating_tokens = 0
        bound = enumerate(admission.request for admission in pending_step.decision.admissions)
        alive = [(i, request) for i, request in bound if request.phase is not Phase.ENDED]
        pending_step.orphans = [(request.held.sequence, i) for i, request in alive]
        return [request for _, request in alive]

    def vacate(self, slot: int) -> Request:
        """The slot's sequence leaves the worker. Results in flight for it are dropped."""
        request = self.running.pop(slot)
        self.prefills.pop(slot, None)
        self.held.pop(slot, None)
        if slot in self.finishing:
            self.finishing.remove(slot)
        else:
            self.frees.append(slot)
        self.slots.release(slot, self.decode_step)
        self.num_departed += 1
        self.num_further -= request.is_further_sequence
        request.held.slot = -1
        return request


PendingSteps = list[tuple[WorkerState, PendingStep]]


def new_plan(worker: WorkerState) -> WorkerServiceLinkResponse:
    """The message for the worker's next plan. Filled in place: adding a plan to a message copies it."""
    worker.steps_sent += 1
    message = WorkerServiceLinkResponse()
    message.plan.step = worker.steps_sent
    if worker.frees:
        message.plan.free_slots = packed(worker.frees)
        worker.frees.clear()
    return message
