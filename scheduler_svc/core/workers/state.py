"""What the scheduler knows of one worker: its slots, its pool, the plans in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from paceline.v1.worker_pb2 import GrammarOrders, KeptSequence, WorkerRegistration, WorkerServiceLinkResponse
from scheduler_svc.core.arrays import packed
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.adapters import Adapters
from scheduler_svc.core.workers.batch import Batch
from scheduler_svc.core.workers.grammars import WorkerGrammars
from scheduler_svc.core.workers.progress import WorkerProgress
from scheduler_svc.core.workers.step_time import StepTimeFit
from scheduler_svc.core.workers.steps import PendingStep, PlannedAdmission, StepInFlight
from scheduler_svc.core.workers.swap_space import SwapSpace

DEFAULT_WINDOW = 2  # steps in flight of a worker that asks for no number
# About twice the time from a step's result to the launch of the next decodes (docs/adr/0001-sharing-two-cores.md).
SHORT_STEP_S = 4e-3


@dataclass(slots=True, eq=False)
class WorkerState:
    """The scheduler's view of one worker."""

    id: int
    registration: WorkerRegistration
    window: int
    batch: Batch
    available_blocks: int
    window_is_set: bool = False  # by the scheduler's setting
    prefix_caching: bool = True
    may_draft: bool = False  # draft rows are switched on, and the worker verifies them
    linked_s: float = 0.0  # when it registered
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    step_fit: StepTimeFit = field(default_factory=StepTimeFit)
    # sequences that the worker kept from an earlier link, until the cache is told
    kept: list[KeptSequence] = field(default_factory=list)
    steps_sent: int = 0
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    pending_step: PendingStep | None = None
    draining: bool = False
    released: bool = False
    preempted: list[Request] = field(default_factory=list)  # online ones, while the next step was being scheduled
    num_pauses: int = 0  # pauses by the capacity policy since the worker last sampled a token (or pooled an input)
    knows_cache: bool = False  # since the worker's last step, the cache answered an exchange that the worker awaited
    # Offline sequences were preempted while the next step was being scheduled: it admits no offline request.
    yielded: bool = False
    asked_for_pins: bool = False  # the cache was asked to give up pins since the worker last ran a sequence
    parked: dict[int, Request] = field(default_factory=dict)  # beams that keep their blocks here, by arrival index
    host: SwapSpace = field(default_factory=SwapSpace)
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
    pools: bool = field(init=False)  # its model is an embedding model, and samples nothing
    adapters: Adapters = field(init=False)
    grammars: WorkerGrammars = field(init=False)

    def __post_init__(self) -> None:
        self.num_blocks = self.registration.num_blocks
        self.block_size = self.registration.block_size
        self.max_batched_tokens = self.registration.max_batched_tokens
        self.pool_tokens = self.num_blocks * self.block_size
        self.incarnation = self.registration.incarnation
        self.eos_token_ids = tuple(self.registration.model.eos_token_ids)
        self.pools = self.registration.model.HasField("embedding")
        self.adapters = Adapters(self.registration.max_loras)
        self.grammars = WorkerGrammars(self.registration.prepares_grammars)

    @property
    def has_credit(self) -> bool:
        """Whether one more step may be in flight. Behind a step that takes longer than the loop, a third or later one
        mostly makes new requests wait, so the worker gets none, unless the scheduler's setting says so."""
        number = len(self.in_flight)
        if self.window_is_set or number < DEFAULT_WINDOW or number >= self.window:
            return number < self.window
        last = self.in_flight[-1]
        return self.step_fit.time.of(last.new_tokens, last.context_tokens, last.num_rows) < SHORT_STEP_S

    @property
    def admissions(self) -> list[PlannedAdmission]:
        """What the pending step admits."""
        return self.pending_step.decision.admissions if self.pending_step else []

    @property
    def is_idle(self) -> bool:
        """No sequence runs, and no step is pending or in flight."""
        return not (self.batch.running or self.in_flight or self.pending_step)

    @property
    def bound(self) -> list[Request]:
        """Running requests, and those that the pending step admits."""
        admitted = (one.request for one in self.admissions if one.request.phase is Phase.ALLOCATING)
        return [*self.batch.running.values(), *admitted]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def refuse(self, request: Request) -> None:
        """A step had no room for the request: the capacity policy refused it, or blocks were missing. See
        has_refused()."""
        if self._refused_at != self.batch.num_departed:
            self._refused_at = self.batch.num_departed
            self._refused.clear()
        self._refused.add(request.arrival_index)

    def has_refused(self, request: Request) -> bool:
        """Whether the worker refused the request and no sequence has left since, so that it would be refused again."""
        return request.arrival_index in self._refused and self._refused_at == self.batch.num_departed

    # What an online request can get: offline sequences do not count, because they yield.

    @property
    def free_slots(self) -> int:
        """Slots that an online request can get, without those that the pending step takes."""
        return self.batch.slots.num_free + len(self.batch.offline) - len(self.admissions)

    @property
    def free_blocks(self) -> int:
        """Blocks that an online request can get, without those that the pending step takes. Cached blocks that the
        pending step reuses are not subtracted."""
        grown = len(self.pending_step.decision.growth) if self.pending_step else 0
        free = self.available_blocks + (self.most_offline_blocks if self.batch.offline else 0)
        return free - grown - sum(self.blocks_for(one.num_new_tokens) for one in self.admissions)

    @property
    def most_offline_blocks(self) -> int:
        """Blocks that running offline sequences hold, counted once for each sequence that shares them."""
        return sum(int(self.batch.slots.capacity[slot]) for slot in self.batch.offline) // self.block_size

    def only_offline_blocks(self) -> int:
        """Blocks of running offline sequences that no running online sequence holds. Takes time in proportion to all
        block tables: 0.5 ms for 256 sequences of 100 blocks."""
        self.batch.slots.complete_tables()
        held = np.zeros(self.num_blocks + 1, bool)  # block ids begin with 1
        for offline in (True, False):
            for request in self.batch.running.values():
                if request.metadata.offline == offline:
                    held[np.frombuffer(request.held.block_table, np.int32)] = offline
        return int(np.count_nonzero(held))

    def adapters_beside(self, request: Request) -> Set[str]:
        """The adapters in the batch that the request cannot displace: an online request displaces those of offline
        sequences."""
        if request.metadata.offline or not self.batch.offline:
            return self.adapters.num_bound.keys()
        return {one.metadata.lora for one in self.bound if one.metadata.lora and not one.metadata.offline}

    def fits_adapter(self, request: Request) -> bool:
        """Whether the batch has room for the request's adapter, has the adapter, or the request has none."""
        if not request.metadata.lora or not self.batch.offline:
            return self.adapters.fit(request)
        loras = self.adapters_beside(request)
        return request.metadata.lora in loras or len(loras) < self.adapters.limit

    def can_ever_hold(self, request: Request) -> bool:
        """Whether the request can fit an empty pool. The last token of a sequence is never computed, so it needs no
        room. An adapter needs a worker that serves adapters."""
        serves = not request.metadata.lora or self.registration.max_loras > 0
        return serves and request.max_total_tokens - 1 <= self.pool_tokens

    def has_grammar(self, request: Request) -> bool:
        """Whether the request's grammar allows a step to run it: the worker has prepared the grammar or prepares none
        in advance, or the request has none."""
        return not request.grammar or self.grammars.has(request.grammar)

    def want_grammar(self, request: Request, *, early: bool = False) -> None:
        """Ask the worker to prepare the grammar if it lacks it. `early` as in WorkerGrammars.want()."""
        if request.grammar:
            self.grammars.want(request.grammar, early=early)

    def grammar_orders(self) -> GrammarOrders:
        """Take the grammar orders that were not sent yet: grammars to prepare, and grammars to forget. Not to be called
        while a step is being scheduled."""
        return self.grammars.take_orders({one.grammar for one in (*self.bound, *self.host.swapped.values())})

    def need_blocks(self, request: Request) -> int:
        """Blocks that the pool loses if all known tokens of the request are admitted at once. Blocks of its cached
        prefix that other sequences use are not counted."""
        return self.blocks_for(request.num_tokens) - request.match_on(self.id).num_referenced_tokens // self.block_size

    @property
    def queued_prefill_tokens(self) -> int:
        """Uncached prompt tokens that no plan computes yet: of running online requests, and of all requests that the
        pending step admits."""
        prefills, offline = self.batch.prefills, self.batch.offline
        queued = sum(prefill.remaining_tokens for prefill in prefills.values())
        if offline:
            queued -= sum(prefills[slot].remaining_tokens for slot in offline & prefills.keys())
        return self.allocating_tokens + queued

    @property
    def num_rows(self) -> int:
        """Running online sequences, and all sequences that the pending step admits."""
        return len(self.batch.running) - len(self.batch.offline) + len(self.admissions)

    @property
    def context_tokens(self) -> int:
        """Known tokens of the sequences that num_rows counts, without those that wait only for their last token: the
        context of a step that runs all of these."""
        tokens = self.batch.context_tokens + sum(one.request.num_tokens for one in self.admissions)
        return tokens - sum(self.batch.num_tokens(slot) for slot in self.batch.offline - self.batch.finishing)

    @property
    def may_lack_blocks(self) -> bool:
        """Whether the next step could need more blocks for running sequences than the last exchange left available."""
        missing = len(self.batch.growing_slots())
        for slot, prefill in self.batch.prefills.items():
            end = prefill.num_planned + min(prefill.remaining_tokens, self.max_batched_tokens)
            missing += max(0, self.blocks_for(end) - int(self.batch.slots.capacity[slot]) // self.block_size)
        return missing > self.available_blocks

    def in_steps(self, first: int, last: int) -> tuple[list[Request], int, int]:
        """Looks at the steps in flight from `first` to `last`. Returns the requests with rows in these steps that still
        run here, the number of sequences in these steps, and the number of steps."""
        steps = [step for step in self.in_flight if first <= step.step <= last]
        pairs = {pair for step in steps for pair in step.slots_and_generations()}
        generation = self.batch.slots.generation
        requests = [self.batch.running[slot] for slot, gen in sorted(pairs) if generation[slot] == gen]
        return requests, len(pairs), len(steps)

    def forget_cache(self) -> None:
        """The cache is gone. Blocks that it granted still hold their KV."""
        self.available_blocks = 0
        self.knows_cache = False
        self.host.forget_cache()

    def drop_pending_step(self) -> list[Request]:
        """Drop the pending step, if any. A later answer of the cache makes no plan; it only tells which `orphans` are
        to be freed. Returns the live requests that the step admits."""
        pending_step, self.pending_step = self.pending_step, None
        if pending_step is None:
            return []
        self.allocating_tokens = 0
        bound = enumerate(admission.request for admission in pending_step.decision.admissions)
        alive = [(i, request) for i, request in bound if request.phase is not Phase.ENDED]
        pending_step.orphans = [(request.held.sequence, i) for i, request in alive]
        return [request for _, request in alive]


PendingSteps = list[tuple[WorkerState, PendingStep]]


def new_plan(worker: WorkerState) -> WorkerServiceLinkResponse:
    """The message for the worker's next plan. Filled in place: adding a plan to a message copies it."""
    worker.steps_sent += 1
    message = WorkerServiceLinkResponse()
    message.plan.step = worker.steps_sent
    if worker.batch.frees:
        message.plan.free_slots = packed(worker.batch.frees)
        worker.batch.frees.clear()
    return message
