"""What policies see of a step: facts, counters and questions. All of them are read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.arrays import Slots
from scheduler_svc.core.policy.order import OrderPolicy, sortable
from scheduler_svc.core.policy.views import Running
from scheduler_svc.core.requests.prefixes import PrefixIndex, longest_shared
from scheduler_svc.core.requests.request import TOKEN_BYTES, PrefixMatch, Request, RequestView, view_of
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.steps import Admitted, OutOfBlocks, PlannedAdmission

Waiting = Callable[[], Iterator[Request]]  # gives the requests that a step may admit, in order


@dataclass(slots=True, eq=False, repr=False)
class StepView:
    """Every counter includes the decisions made so far. Only names that begin with _ can be written; they belong to
    Step.

    All state is in slots, and everything public is a property or a method. So an assignment to a public name raises
    AttributeError, and Step's own writes are plain assignments.
    """

    _worker: WorkerState
    _waiting: Waiting
    _now_s: float
    _over_budget: Callable[[Request, Admitted], str | None]  # the budget outside the policies that a request exceeds
    _order: OrderPolicy
    _shares: bool  # as BatchPolicy.shares_in_step; False without prefix caching
    _offline: bool = field(default=False, kw_only=True)  # the class of the requests that the step sees
    _num_hidden: int = field(default=0, init=False)  # running sequences of the other class
    _lent_blocks: int = field(default=0, init=False)  # of _available_blocks: held by offline sequences
    _max_batched_tokens: int = field(init=False)
    _num_running: int = field(init=False)
    _preempted: tuple[RequestView, ...] = field(init=False)
    _running: tuple[Running, ...] | None = field(default=None, init=False)  # computed at the first use
    _available_blocks: int = field(init=False)
    _budget_tokens: int = field(init=False)
    _num_free_slots: int = field(init=False)
    _growth: list[Slots] = field(default_factory=list, init=False)
    _decodes: list[int] | None = field(default_factory=list, init=False)  # slots; None: all decoding slots
    _chunks: dict[int, int] = field(default_factory=dict, init=False)  # tokens by slot
    # requests with tokens to compute in the step, and how many tokens are computed after it
    _computing: PrefixIndex[Request] = field(init=False)
    _arriving: PrefixIndex[Request] = field(init=False)  # considered requests, with all known tokens
    # `prefills`, with all known tokens; computed at the first use
    _prefilling: PrefixIndex[Request] | None = field(default=None, init=False)
    # By arrival index: requests that `waiting` yielded, considered ones, placed ones.
    _offered: dict[int, Request] = field(default_factory=dict, init=False)
    _considered: dict[int, PlannedAdmission] = field(default_factory=dict, init=False)
    _placed: dict[int, PlannedAdmission] = field(default_factory=dict, init=False)
    _budgeted: Admitted = field(default_factory=Admitted, init=False)  # considered requests
    _full_loras: set[str] = field(default_factory=set, init=False)  # adapters that the batch has no room for
    _rejected: list[tuple[Request, str, str]] = field(default_factory=list, init=False)
    # why no request is offered a slot: reason, detail
    _closed: tuple[str, str] | None = field(default=None, init=False)
    _open: bool = field(default=True, init=False)
    _lack: OutOfBlocks | None = field(default=None, init=False)  # set when the schedule has failed for want of blocks
    # The last answer of _credit(). Valid until a request is placed or computed.
    _credit_of: tuple[Request, int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        worker = self._worker
        self._num_running = len(worker.batch.running)
        self._preempted = tuple(map(view_of, worker.preempted))
        self._available_blocks = worker.available_blocks
        self._budget_tokens = self._max_batched_tokens = worker.max_batched_tokens
        self._num_free_slots = worker.batch.slots.num_free
        if worker.batch.offline or self._offline:
            num_offline = len(worker.batch.offline)
            self._num_hidden = self._num_running - num_offline if self._offline else num_offline
            self._num_running -= self._num_hidden
            if not self._offline:  # offline sequences yield their slots
                self._num_free_slots += num_offline
        self._computing = PrefixIndex(worker.block_size)
        self._arriving = PrefixIndex(worker.block_size)
        self._shares = self._shares and worker.prefix_caching

    # ── what does not change while a step is scheduled ───────────────────────────────────────────────────────────────

    @property
    def now_s(self) -> float:
        """When the step is scheduled, in seconds, on the clock of `RequestView.arrival_s`."""
        return self._now_s

    @property
    def worker_id(self) -> int:
        """The worker that runs the step. An id is never reused while the scheduler runs."""
        return self._worker.id

    def rank(self, request: RequestView) -> Any:
        """The rank of a request, smaller first; None if the order has no ranks. Raises PolicyError for NaN."""
        key = self._order.rank(request)
        return None if key is None else (sortable(key, request), request.queue_position)

    def goes_before(self, waiting: RequestView, running: RequestView) -> bool:
        """Whether the order would offer the waiting request a slot before the running one, if both waited."""
        return self._order.goes_before(waiting, running, self._now_s)

    @property
    def ranking(self) -> object:
        """The order that gives the ranks. Ranks of two steps can be compared if this object is the same in both: it
        changes when the order fails and another one replaces it."""
        return self._order

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._worker.block_size

    @property
    def total_blocks(self) -> int:
        """Device blocks of the worker, free or not."""
        return self._worker.num_blocks

    @property
    def max_batched_tokens(self) -> int:
        """Token budget of the whole step."""
        return self._max_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        """Slots of the worker, free or not."""
        return self._worker.batch.slots.num_slots

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self._num_running

    @property
    def num_departed(self) -> int:
        """Sequences that ever left this worker. A step for online requests does not count offline sequences."""
        batch = self._worker.batch
        return batch.num_departed if self._offline else batch.num_departed - batch.num_offline_departed

    @property
    def preempted(self) -> Sequence[RequestView]:
        """Requests that were preempted while this step was being scheduled."""
        return self._preempted

    # ── counters ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, evictable, or held by offline sequences that yield; not those that this step takes."""
        return self._available_blocks

    @property
    def budget_tokens(self) -> int:
        """Tokens left of the step's budget."""
        return self._budget_tokens

    @property
    def num_free_slots(self) -> int:
        """Requests that may still be admitted."""
        return self._num_free_slots

    @property
    def num_admissions(self) -> int:
        """Waiting requests that the step admits so far."""
        return len(self._placed)

    @property
    def running(self) -> tuple[Running, ...]:
        """Sequences that can run, in order of admission. The first use takes time in proportion to their number."""
        if self._running is None:
            running, over = self._worker.batch.running, self._worker.batch.finishing
            shown = self._own_class(running)
            self._running = tuple(Running(self._worker, slot, running[slot]) for slot in shown if slot not in over)
        return self._running

    @property
    def prefills(self) -> list[Running]:
        """Running sequences with known tokens that are not computed, in order of admission."""
        worker = self._worker
        shown = self._own_class(worker.batch.prefills) if self._num_hidden else worker.batch.prefills
        return [Running(worker, slot, worker.batch.running[slot]) for slot in shown]

    @property
    def num_decoding(self) -> int:
        """Running sequences that want one token."""
        if self._num_hidden:
            return self._worker.batch.num_decoding_of(self._offline)
        return self._worker.batch.num_decoding

    def _own_class(self, slots: Iterable[int]) -> Iterable[int]:
        """The slots with sequences of the class that the step sees."""
        if not self._num_hidden:
            return slots
        hidden = self._worker.batch.offline
        return (slot for slot in slots if (slot in hidden) == self._offline)

    def _growing_slots(self) -> Slots:
        """Slots of decoding sequences that need one more block if all of them decode in the next step."""
        batch = self._worker.batch
        slots = batch.growing_slots()
        return slots[batch.slots.offline[slots] == self._offline] if self._num_hidden else slots

    @property
    def num_swapped(self) -> int:
        """Requests that this worker has swapped out and may resume. They come first among the waiting requests."""
        return 0 if self._preempted else len(self._worker.host.swapped)

    def waiting(self) -> Iterator[RequestView]:
        """Requests that may be bound to this worker: first those that it has swapped out, then the others in queue
        order. Only these can be admitted."""
        for request in self._waiting():
            if request.metadata.lora and request.metadata.lora in self._full_loras:
                continue  # an earlier request with this adapter did not fit the batch
            self._offered[request.arrival_index] = request
            yield request.view or view_of(request)

    def cached_tokens(self, request: RequestView | Request) -> int:
        """Tokens of a waiting request that this worker need not compute. They are in its cache (first those on the
        device, then those in host memory), swapped out here, in the parent that it forks from, or computed in this step
        for another request. With partial reuse they may end within a block. The last token is never among them."""
        own = request._request if isinstance(request, RequestView) else request
        return self._credit(own)[1]

    def _credit(self, request: Request) -> tuple[Request, int, int]:
        """The request; its cached tokens; and of these, tokens in blocks that other sequences reference, also sequences
        that this step admits. The last answer is kept, because a policy and then the step ask for the same request."""
        known = self._credit_of
        if known is not None and known[0] is request:
            return known
        match = request.match_on(self._worker.id)
        cached, referenced, on_device = match.num_tokens, match.num_referenced_tokens, self._device_tokens(match)
        if self._shares and self._computing and not (request.held.swapped_on or request.needs_whole_prompt):
            # The prefix that the request shares with another request of this step: it is on the device after the step.
            computed = self._computing.shared_tokens(request, on_device)
            if computed > on_device:
                cached, referenced = max(cached, computed), max(referenced, computed)
        # Only the cache knows which blocks a swapped-out request shares.
        if referenced < on_device and self._considered and not request.held.swapped_on:
            referenced = self._shared_tokens(request, on_device, referenced)
        self._credit_of = known = request, cached, referenced
        return known

    def _device_tokens(self, match: PrefixMatch) -> int:
        """Matched tokens on the device, in the whole blocks that the request would share."""
        block_size = self._worker.block_size
        return (match.num_tokens - match.num_host_tokens) // block_size * block_size

    def has_admitted(self, request: RequestView) -> bool:
        """Whether this step admits the request."""
        return request.arrival_index in self._placed

    def exceeds_budget(self, request: RequestView) -> bool:
        """Whether the budget of its tenant, or of adapters in the batch, keeps a waiting request out of the step."""
        return self._over_budget(request._request, self._budgeted) is not None

    def uncached_tokens(self, request: RequestView) -> int:
        """Tokens of a waiting request that this worker has to compute: at least the last one."""
        return request.num_tokens - self.cached_tokens(request)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self._worker.block_size)

    def need_blocks(self, request: RequestView, num_new_tokens: int) -> int:
        """Available blocks that a waiting request takes, to hold its cached prefix and this many new tokens."""
        return self._need_blocks(request._request, num_new_tokens)

    def _need_blocks(self, request: Request, num_new_tokens: int) -> int:
        _, cached, referenced = self._credit(request)
        block_size = self._worker.block_size
        return -(-(cached + num_new_tokens) // block_size) - referenced // block_size

    def remaining_new_tokens(self) -> npt.NDArray[np.int64]:
        """For each sequence that holds a slot: tokens that it may still generate. [num_running]"""
        return self._worker.batch.remaining_new_tokens(self._offline if self._num_hidden else None)

    def promised_blocks(self) -> int:
        """Blocks that the running sequences still take if they generate as many tokens as they may."""
        return self._worker.batch.promised_blocks(self._offline if self._num_hidden else None)

    def growth_blocks(self) -> int:
        """Blocks that all decoding sequences take for their next token."""
        return len(self._growing_slots())

    def another_computes_prefix_of(self, request: RequestView, others: PrefixIndex[RequestView] | None = None) -> bool:
        """Whether another request is computing the first block of this request that is not on the device, or copying
        that block to the device. The other request runs, was admitted before in this step, or is one of `others`.
        Then it pays to wait (TensorRT-LLM's prefix-aware scheduling)."""
        depth = self._device_tokens(request._request.match_on(self._worker.id))
        wanted = depth + self.block_size
        if wanted > request.num_tokens or not self._worker.prefix_caching or request.is_swapped:
            return False
        computing: list[PrefixIndex[Request] | PrefixIndex[RequestView]] = [self._prefills_by_prefix()]
        # A block that ends with the request's last token is not reused, even if it is cached.
        if wanted < request.num_tokens:
            computing += [self._arriving, others] if others else [self._arriving]
        beginning, own = request.token_ids[: wanted * TOKEN_BYTES], request.namespace
        return any(
            other.token_ids.startswith(beginning) and other.namespace == own
            for index in computing
            for other, _ in index.alike(request, depth)
        )

    def _prefills_by_prefix(self) -> PrefixIndex[Request]:
        if self._prefilling is None:
            worker = self._worker
            self._prefilling = PrefixIndex(worker.block_size)
            for request in map(worker.batch.running.__getitem__, self._own_class(worker.batch.prefills)):
                self._prefilling.add(request, request.num_tokens)
        return self._prefilling

    def _shared_tokens(self, request: Request, on_device: int, referenced: int) -> int:
        """The longest prefix on the device, in whole blocks, that is referenced or shared with a considered request."""
        arriving = (
            (other, self._device_tokens(other.match_on(self._worker.id)))
            for other, _ in self._arriving.alike(request, referenced)
        )
        return longest_shared(request, arriving, referenced, on_device, self._worker.block_size)
