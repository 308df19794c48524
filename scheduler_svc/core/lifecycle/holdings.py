"""What requests hold: a worker, a slot, blocks, a share of the budgets, a sequence at the cache.

release() takes back all of it, in any phase. Most of it is also given here. The exceptions: the Emitter gives the slot
and the blocks that the cache has granted, and Swaps notes host blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from paceline.v1.cache_pb2 import WorkerMatch
from scheduler_svc.core.admission.budgets import ClassBudgets
from scheduler_svc.core.admission.queue import ClassQueues
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.cache.swapping import Swaps
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import PrefixMatch, Request
from scheduler_svc.core.workers.state import WorkerState


@dataclass(slots=True, eq=False)
class Holdings:
    """Binds requests to workers, and releases what they hold. The caller changes the phase, after the release."""

    _queue: ClassQueues
    _budgets: ClassBudgets
    _cache: CacheLink
    _workers: dict[int, WorkerState]
    _swaps: Swaps
    _partial_reuse: bool
    _matched: dict[int, Request] = field(default_factory=dict, init=False)  # by sequence: known to the cache
    # Names of sequences that were not given yet.
    sequences: Iterator[int] = field(default_factory=partial(itertools.count, 1), init=False)

    def ask_match(self, request: Request) -> None:
        """Make the request known to the cache, under a new name."""
        held = request.held
        held.sequence, request.matches = next(self.sequences), None
        held.num_registered, held.num_committed = request.num_tokens, 0
        self._cache.matches[held.sequence] = self._matched[held.sequence] = request

    def set_matches(self, found: Iterable[tuple[int, Iterable[WorkerMatch]]]) -> None:
        """What the cache holds of waiting sequences. A request that no longer waits ignores the update."""
        changed = []
        for sequence, matches in found:
            request = self._matched.get(sequence)
            if request is not None and request.phase is Phase.WAITING:
                request.matches = by_worker = {}
                for match in matches if not request.needs_whole_prompt else ():
                    on_host = match.num_host_tokens
                    by_worker[match.worker] = PrefixMatch(match.num_tokens + on_host, match.num_live_tokens, on_host)
                changed.append(request)
        if changed:
            self._queue.rematched(changed)

    def forget_matches(self) -> None:
        """The cache is lost, with all it knew of waiting requests. Swapped-out requests keep their KV."""
        self._matched.clear()
        for request in self._queue:
            if not request.held.swapped_on:
                request.held.sequence, request.matches = 0, None

    def bind(self, worker: WorkerState, request: Request) -> None:
        """A step takes the waiting request."""
        # Before the request leaves the queue: remove() reads the budget to find the tenant's next requests.
        self._budgets.of(request).bind(request)
        queue = self._queue.of(request)
        queue.remove(request)
        request.family.siblings.num_bound += 1
        if request.held.swapped_on:
            self._swaps.bind(request)
        queue.started(request)
        request.held.worker = worker.id
        worker.adapters.bind(request)

    def park(self, request: Request) -> None:
        """The running request leaves its slot and keeps its blocks."""
        worker = self._workers[request.held.worker]
        worker.batch.slots.complete_tables()
        worker.batch.vacate(request.held.slot)
        self._unbind(request)
        request.held.worker, request.family.parent = worker.id, None
        request.held.prompt_is_computed = True
        worker.parked[request.arrival_index] = request

    def release(self, request: Request, *, lost: WorkerState | None = None, keeps_sequence: bool = False) -> None:
        """Take back everything that the request holds in its phase.

        `lost`: the worker on which its blocks are lost. The cache is not told, because it knows of the loss, or is lost
        itself. `keeps_sequence`: the cache keeps the sequence. A running request is then swapped out."""
        held = request.held
        held.prompt_is_computed = False
        del held.block_table[:]
        match request.phase:
            case Phase.RUNNING:
                worker = lost or self._workers[held.worker]
                self.flush_output(worker, held.slot)
                worker.batch.vacate(held.slot)
                request.family.parent = None
                if lost is None:
                    self._commit_last_tokens(worker, request, keeps_sequence)
                self._unbind(request)
            case Phase.ALLOCATING:
                self._unbind(request)
            case Phase.PARKED:
                worker = lost or self._workers[held.worker]
                del worker.parked[request.arrival_index]
                held.worker = 0
        if keeps_sequence:
            return
        if held.swapped_on:
            self._swaps.forget(request)
        if held.sequence and lost is None and self._cache.connected:
            self._cache.forget_sequence(held.sequence, discard=request.kv_is_invalid)
        self._matched.pop(held.sequence, None)
        held.sequence = 0

    def flush_output(self, worker: WorkerState, slot: int) -> None:
        """Complete the request's own record with the tokens in the slot's output buffer."""
        if tokens := worker.batch.slots.output.flush(slot):
            worker.batch.running[slot].add_output(tokens)

    def _commit_last_tokens(self, worker: WorkerState, request: Request, swaps: bool) -> None:
        """Tell the cache of the tokens that the request generated: only now, when the request leaves its slot. Another
        request rarely needs them earlier. So a decode step sends nothing per sequence to the cache (as in SGLang). A
        swap needs all tokens at the cache."""
        held, num_tokens = request.held, request.num_tokens
        num_computed = max(num_tokens - 1, held.num_committed)  # the last token's KV may not be written yet
        if self._partial_reuse:
            fills = num_tokens > held.num_registered
        else:
            fills = num_computed // worker.block_size > held.num_registered // worker.block_size
        is_news = fills and num_computed > held.num_committed  # no request can reuse a token that is not computed
        if swaps or (worker.prefix_caching and is_news and not request.kv_is_invalid):
            self._cache.add_commit(held.sequence, request.tokens_from(held.num_registered), num_computed)
            held.num_registered = num_tokens

    def _unbind(self, request: Request) -> None:
        self._budgets.of(request).unbind(request)
        request.family.siblings.num_bound -= 1
        queue = self._queue.of(request)
        queue.free_tokens_changed(request.metadata.tenant)
        if worker := self._workers.get(request.held.worker):
            worker.adapters.unbind(request)
        request.held.worker = 0
        queue.stopped(request)
