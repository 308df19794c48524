"""A placement policy's read-only view of the workers. Every counter includes what the round has placed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.prefixes import PrefixIndex
from scheduler_svc.core.requests.request import Request, RequestView
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.step_time import StepTime


class WorkerView:
    """A worker, while a round places requests. Only names that begin with _ can be written; they belong to the core."""

    __slots__ = (
        "_context_tokens",
        "_free_blocks",
        "_free_slots",
        "_in_flight_s",
        "_placed",
        "_prefill_tokens",
        "_read_at",
        "_rows",
        "_waiting",
        "_worker",
    )

    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker
        self._waiting: dict[int, Request] = {}  # requests that the round has placed here, by arrival index
        self._read()

    def _read(self) -> None:
        """Read the worker's state. A round sees many workers and finds most of them full. So a slow value is read at
        its first use. `_add` reads it too, before it adds the request's share."""
        worker = self._worker
        self._read_at = worker.steps_sent, worker.batch.num_departed
        self._free_slots = worker.free_slots
        self._rows = worker.num_rows
        self._free_blocks: int | None = None
        self._prefill_tokens = self._context_tokens = -1
        self._in_flight_s: float | None = None
        self._placed: PrefixIndex[Request] | None = None  # requests placed here, and those with queued prefill

    def __repr__(self) -> str:
        return f"<worker {self.id}: {self._rows} rows, {self.queued_prefill_tokens} prompt tokens queued>"

    @property
    def id(self) -> int:
        """The worker's id. An id is never reused while the scheduler runs."""
        return self._worker.id

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_rows(self) -> int:
        """Running online sequences, all sequences that the pending step admits, and the requests that this round has
        placed here."""
        return self._rows

    @property
    def queued_prefill_tokens(self) -> int:
        """Uncached prompt tokens of the sequences in `num_rows` that no plan computes yet. A new request waits for
        them."""
        if self._prefill_tokens < 0:
            self._prefill_tokens = self._worker.queued_prefill_tokens
        return self._prefill_tokens

    @property
    def context_tokens(self) -> int:
        """Known tokens of the sequences in `num_rows`: what a decode step attends to."""
        if self._context_tokens < 0:
            self._context_tokens = self._worker.context_tokens
        return self._context_tokens

    @property
    def free_slots(self) -> int:
        """Slots for online requests that the round has not given to a request yet. Negative if requests were placed
        here to wait for a slot."""
        return self._free_slots

    @property
    def free_blocks(self) -> int:
        """Blocks that are free, only cached, or held by offline sequences (which yield)."""
        if self._free_blocks is None:
            self._free_blocks = self._worker.free_blocks
        return self._free_blocks

    # ── the worker itself ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._worker.block_size

    @property
    def num_blocks(self) -> int:
        """Device blocks, free or not."""
        return self._worker.num_blocks

    @property
    def max_num_seqs(self) -> int:
        """Slots."""
        return self._worker.batch.slots.num_slots

    @property
    def max_batched_tokens(self) -> int:
        """Token budget of a step."""
        return self._worker.max_batched_tokens

    @property
    def step_time(self) -> StepTime:
        """The model of its step times, fitted to its results."""
        return self._worker.step_fit.time

    @property
    def in_flight_s(self) -> float:
        """Predicted seconds of the steps that were sent and have no result yet, without subtracting the time that they
        have run: a request that is bound now runs after them."""
        if self._in_flight_s is None:
            of = self._worker.step_fit.time.of
            self._in_flight_s = sum(
                of(step.new_tokens, step.context_tokens, step.num_rows) for step in self._worker.in_flight
            )
        return self._in_flight_s

    # ── a request's prefix ───────────────────────────────────────────────────────────────────────────────────────────

    def matched_tokens(self, request: RequestView) -> int:
        """Tokens of the request that the worker has: in its cache, swapped out, or in the parent that it forks from."""
        return request._request.match_on(self._worker.id).num_tokens

    def cached_tokens(self, request: RequestView) -> int:
        """Tokens of the request that need not be computed here: cached tokens, and whole blocks that a request ahead of
        it computes (placed here in this round, or with its prefill queued here)."""
        return self._cached_tokens(request._request)

    def _cached_tokens(self, request: Request) -> int:
        worker = self._worker
        matched = request.match_on(worker.id).num_tokens
        if not worker.prefix_caching or request.held.swapped_on or request.needs_whole_prompt:
            return matched
        if self._placed is None:
            self._placed = PrefixIndex(worker.block_size)
            batch = worker.batch
            prefills = [batch.running[slot] for slot in batch.prefills if slot not in batch.offline]
            for other in (*prefills, *(admission.request for admission in worker.admissions)):
                self._placed.add(other, other.num_tokens)
        if not len(self._placed):
            return matched
        return max(matched, self._placed.shared_tokens(request, matched // worker.block_size * worker.block_size))

    # ── the round ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_outdated(self) -> bool:
        """Whether the worker has been sent a step, or a sequence has left it, since the view was read."""
        return self._read_at != (self._worker.steps_sent, self._worker.batch.num_departed)

    def _has_room(self, request: Request) -> bool:
        worker = self._worker
        return (
            self._free_slots > 0
            and worker.need_blocks(request) <= self.free_blocks
            and worker.fits_adapter(request)
            and worker.has_grammar(request)
            and not worker.has_refused(request)
        )

    def _add(self, request: Request) -> None:
        """The round has placed the request here."""
        self._prefill_tokens = self.queued_prefill_tokens + request.num_tokens - self._cached_tokens(request)
        self._context_tokens = self.context_tokens + request.num_tokens
        self._free_blocks = self.free_blocks - self._worker.need_blocks(request)
        self._rows += 1
        self._free_slots -= 1
        self._waiting[request.arrival_index] = request
        if self._placed is not None:
            self._placed.add(request, request.num_tokens)

    def _renew(self) -> None:
        """Read the worker again, and count the placed requests that still wait for it."""
        waiting = [request for request in self._waiting.values() if request.phase is Phase.WAITING]
        self._waiting.clear()
        self._read()
        for request in waiting:
            self._add(request)


@dataclass(frozen=True, slots=True)
class FleetView:
    """All workers of a round, full ones included."""

    workers: Sequence[WorkerView]  # by ascending id, without draining workers
    # Mean output tokens of a request that ends by itself; the latest 128 count most. None before the first.
    mean_output_tokens: float | None = None
