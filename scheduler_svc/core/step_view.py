"""What policies see of a step: facts, counters and questions, all of them read-only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.arrays import Slots
from scheduler_svc.core.decision import Admission, OutOfBlocks
from scheduler_svc.core.policy import CapacityPolicy
from scheduler_svc.core.request import TOKEN_BYTES, Request
from scheduler_svc.core.view import RequestView, Running, view_of
from scheduler_svc.core.worker import Worker


class StepView:
    """Everything counts what is decided so far. Only names that begin with _ can be written: they are Step's own."""

    # What does not change while a step is composed.
    now_s: float
    worker_id: int
    block_size: int
    total_blocks: int
    max_batched_tokens: int
    max_num_seqs: int
    num_running: int  # that hold a slot
    num_departed: int  # that ever left this worker
    preempted: Sequence[RequestView]  # that gave way while this step was composed

    # What Step keeps.
    _worker: Worker
    _waiting: Callable[[], Iterator[Request]]
    _capacity: CapacityPolicy
    _over_budget: Callable[[Request, Collection[Admission]], str | None]
    _available_blocks: int
    _budget_tokens: int
    _num_seats: int
    _growth: list[Slots]
    _decodes: list[int] | None  # slots; None: all that decode
    _chunks: dict[int, int]  # tokens by slot
    _offered: dict[RequestView, Request]  # what `waiting` gave
    _considered: dict[int, Admission]  # by seniority
    _placed: dict[int, Admission]  # by seniority
    _held_back: list[tuple[Request, str, str]]
    _open: bool
    _lack: OutOfBlocks | None  # of blocks: then the composition has failed

    def __init__(
        self,
        worker: Worker,
        waiting: Callable[[], Iterator[Request]],
        capacity: CapacityPolicy,
        now_s: float,
        over_budget: Callable[[Request, Collection[Admission]], str | None],
        max_num_seqs: int = 0,
    ) -> None:
        """`over_budget` says which budget, of those that are not the policies', a request exceeds, if any."""
        seats = worker.slots.num_slots if not max_num_seqs else min(max_num_seqs, worker.slots.num_slots)
        # Past __setattr__, and quick: a step is made for every one that a worker runs.
        vars(self).update(
            now_s=now_s,
            worker_id=worker.id,
            block_size=worker.block_size,
            total_blocks=worker.num_blocks,
            max_batched_tokens=worker.max_batched_tokens,
            max_num_seqs=seats,
            num_running=len(worker.running),
            num_departed=worker.num_departed,
            preempted=tuple(map(view_of, worker.preempted)),
            _worker=worker,
            _waiting=waiting,
            _capacity=capacity,
            _over_budget=over_budget,
            _available_blocks=worker.available_blocks,
            _budget_tokens=worker.max_batched_tokens,
            _num_seats=min(worker.slots.num_free, seats - len(worker.running)),
            _growth=[],
            _decodes=[],
            _chunks={},
            _offered={},
            _considered={},
            _placed={},
            _held_back=[],
            _open=True,
            _lack=None,
        )

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"step.{name}: is read-only")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"step.{name}: is read-only")

    @property
    def available_blocks(self) -> int:
        """Free or evictable, and not taken by this step."""
        return self._available_blocks

    @property
    def budget_tokens(self) -> int:
        """Left of the step's tokens."""
        return self._budget_tokens

    @property
    def num_seats(self) -> int:
        """Requests that may still be admitted."""
        return self._num_seats

    @property
    def num_admissions(self) -> int:
        return len(self._placed)

    @cached_property
    def running(self) -> tuple[Running, ...]:
        """What can run, in order of admission. Costs time in proportion; steady steps need not look."""
        worker = self._worker
        return tuple(Running(worker, slot, r) for slot, r in worker.running.items() if slot not in worker.finishing)

    @property
    def prefills(self) -> list[Running]:
        """Running sequences whose known tokens are not all computed, in order of admission."""
        worker = self._worker
        return [Running(worker, slot, worker.running[slot]) for slot in worker.prefills]

    @property
    def num_decoding(self) -> int:
        """Running sequences that want one token."""
        return self._worker.num_decoding

    @property
    def num_swapped(self) -> int:
        """Requests that this worker has swapped out and may take back. They come first among those that wait."""
        return 0 if self.preempted else len(self._worker.swapped)

    def waiting(self) -> Iterator[RequestView]:
        """Requests that could be bound to this worker: those that it has swapped out, then the others in the order's
        order. Only these can be admitted."""
        for request in self._waiting():
            view = view_of(request)
            self._offered[view] = request
            yield view

    def cached_tokens(self, request: RequestView | Request) -> int:
        """What this worker has in its cache of a waiting request: whole blocks, never the last token."""
        return request.matched_tokens(self.worker_id)

    def uncached_tokens(self, request: RequestView) -> int:
        return request.num_tokens - request.matched_tokens(self.worker_id)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def need_blocks(self, request: RequestView, num_new_tokens: int) -> int:
        """Blocks that a waiting request takes out of those available, to hold its cached prefix and so many tokens."""
        blocks = self.blocks_for(self.cached_tokens(request) + num_new_tokens)
        return blocks - self._live_tokens(request) // self.block_size

    def remaining_new_tokens(self) -> npt.NDArray[np.int64]:
        """For each sequence that holds a slot: how many tokens it may still generate. [num_running]"""
        return self._worker.remaining_new_tokens()

    def promised_blocks(self) -> int:
        """Blocks that what runs will still take if all of it generates as much as it may."""
        return self._worker.promised_blocks()

    def growth_blocks(self) -> int:
        """Blocks that everything that decodes takes for its next token."""
        return len(self._worker.growing_slots())

    def another_computes_prefix_of(self, request: RequestView, others: Iterable[RequestView] = ()) -> bool:
        """Whether something that runs, or was let in before it in this step, or is one of `others`, is just computing
        the first block of the request that is not cached. Then it pays to wait (TensorRT-LLM's prefix-aware
        scheduling)."""
        wanted = self.cached_tokens(request) + self.block_size
        if wanted > request.num_tokens or not self._worker.prefix_caching or request.is_swapped:
            return False
        beginning = request.token_ids[: wanted * TOKEN_BYTES]
        computing: list[RequestView | Request] = [sequence.request for sequence in self.prefills]
        if wanted < request.num_tokens:  # else that block may well be cached, and not reused for its last token
            computing += [*(admission.request for admission in self._considered.values()), *others]
        return any(other.token_ids.startswith(beginning) for other in computing)

    def _live_tokens(self, request: RequestView) -> int:
        """Tokens in blocks that something uses, counting what was admitted before it in this very step."""
        live = request.live_tokens(self.worker_id)
        if not self._considered or request.is_swapped:  # what of that one is shared, only the cache knows
            return live
        matched, tokens = self.cached_tokens(request), request.token_ids
        for admission in self._considered.values():
            if live >= matched:
                break
            others = admission.request.token_ids
            if not others.startswith(tokens[: (live + self.block_size) * TOKEN_BYTES]):
                continue
            # The longest beginning of whole blocks that they share.
            lengths = range(min(self.cached_tokens(admission.request), matched), live, -self.block_size)
            i = bisect_left(lengths, True, key=lambda n: others.startswith(tokens[: n * TOKEN_BYTES]))
            live = lengths[i] if i < len(lengths) else live
        return live
