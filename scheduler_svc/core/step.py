"""One step of one worker, while policies compose it: what they see, and what they may decide."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.arrays import Longs, Slots
from scheduler_svc.core.borders import NONE
from scheduler_svc.core.policy import CapacityPolicy, PolicyError, Verdict
from scheduler_svc.core.request import TOKEN_BYTES, Request
from scheduler_svc.core.view import RequestView, Running, StepFacts
from scheduler_svc.core.worker import ROW_COST_TOKENS, Worker


class OutOfBlocks(Exception):
    """What runs needs `shortfall_blocks` more than there are: somebody has to give way."""

    def __init__(self, shortfall_blocks: int) -> None:
        super().__init__(f"{shortfall_blocks} blocks are missing")
        self.shortfall_blocks = shortfall_blocks


class Paused(Exception):
    """A policy took running sequences out."""

    def __init__(self, victims: list[Running]) -> None:
        super().__init__(f"{len(victims)} sequences give way")
        self.victims = victims


@dataclass(frozen=True, slots=True)
class Admission:
    request: Request
    num_tokens: int  # to compute in this step
    num_new_tokens: int  # to take blocks for, after the cached prefix


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of a composition."""

    growth: Slots  # one block each; a slot may stand several times
    growth_generations: Longs
    decodes: list[int] | None  # slots; None: all that decode
    chunks: list[tuple[int, int, int]]  # (slot, generation, tokens)
    admissions: list[Admission]
    held_back: list[tuple[Request, str, str]]  # (request, reason, detail): first of the queue that did not get in


class Step(StepFacts):
    """Policies read the attributes and call the methods under "decisions"; everything counts what is decided so far.

    Nothing that a policy does to it can bring about a step that cannot be: attributes are read-only, a decision is
    checked before it changes anything, and after the composition none is taken any more.
    """

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
            max_batched_tokens=worker.registration.max_batched_tokens,
            max_num_seqs=seats,
            num_running=len(worker.running),
            num_departed=worker.num_departed,
            preempted=tuple(map(RequestView, worker.preempted)),
            _worker=worker,
            _waiting=waiting,
            _capacity=capacity,
            _over_budget=over_budget,
            _available_blocks=worker.available_blocks,
            _budget_tokens=worker.registration.max_batched_tokens,
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

    # ── what policies see ────────────────────────────────────────────────────────────────────────────────────────────

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

    def waiting(self) -> Iterator[RequestView]:
        """Requests that could be bound to this worker, in the order's order. Only these can be admitted."""
        for request in self._waiting():
            view = RequestView(request)
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
        if wanted > request.num_tokens or not self._worker.prefix_caching:
            return False
        beginning = request.token_ids[: wanted * TOKEN_BYTES]
        computing: list[RequestView | Request] = [sequence.request for sequence in self.prefills]
        if wanted < request.num_tokens:  # else that block may well be cached, and not reused for its last token
            computing += [*(admission.request for admission in self._considered.values()), *others]
        return any(other.token_ids.startswith(beginning) for other in computing)

    def _live_tokens(self, request: RequestView) -> int:
        """Tokens in blocks that something uses, counting what was admitted before it in this very step."""
        live, matched = request.live_tokens(self.worker_id), self.cached_tokens(request)
        if live == matched:
            return live
        tokens = request.token_ids
        for admission in self._considered.values():
            common = min(self.cached_tokens(admission.request), matched)
            while (
                common > live and tokens[: TOKEN_BYTES * common] != admission.request.token_ids[: TOKEN_BYTES * common]
            ):
                common -= self.block_size
            live = max(live, common)
        return live

    # ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    # A decision that cannot be raises before it changes anything. A lack of blocks ends the composition, whether or not
    # the policy lets the exception through.

    def run_decodes(self) -> None:
        """Everything that decodes gets its token. Raises OutOfBlocks; PolicyError if the token budget is too small."""
        self._expect_open()
        if self._decodes != []:
            raise PolicyError("run_decodes after run or run_decodes of a decoding sequence")
        self._spend(self.num_decoding)
        self._decodes = None
        growing = self._worker.growing_slots()
        if len(growing):
            self._grow(growing)

    def run(self, sequence: Running, num_tokens: int) -> None:
        """Compute so many of its remaining tokens. Raises OutOfBlocks, PolicyError."""
        self._expect_open()
        sequence, num_tokens = self._own(sequence), operator.index(num_tokens)
        slot = sequence.slot
        if slot in self._chunks or (sequence.is_decoding and (self._decodes is None or slot in self._decodes)):
            raise PolicyError(f"run: {sequence.request} is in the step already")
        if not 1 <= num_tokens <= sequence.remaining_tokens:
            raise PolicyError(f"run: {num_tokens} tokens of {sequence.remaining_tokens} that remain")
        self._spend(num_tokens)
        if sequence.is_decoding:
            assert self._decodes is not None
            self._decodes.append(slot)
        else:
            self._chunks[slot] = num_tokens
        missing = self.blocks_for(sequence.num_computed_tokens + num_tokens) - sequence.num_blocks
        if missing > 0:
            self._grow(np.full(missing, slot, np.int32))

    def admit(self, request: RequestView, num_tokens: int) -> Verdict:
        """Offer a waiting request a place, with so many of its uncached tokens to compute in this step.

        Raises PolicyError if that is more than it has, or than the budget has left.
        """
        verdict = self.consider(request, num_tokens)
        if verdict is Verdict.ADMIT:
            self.place(request, num_tokens)
        return verdict

    def consider(self, request: RequestView, num_tokens: int) -> Verdict:
        """Whether a waiting request may have a seat, and blocks for so many of its uncached tokens. They are set aside
        for it; who is not placed after all gives them back when the step ends. Raises PolicyError."""
        self._expect_open()
        own, num_tokens = self._waits(request), operator.index(num_tokens)
        request, uncached = RequestView(own), self.uncached_tokens(request)
        if not 1 <= num_tokens <= uncached or request.seniority in self._considered:
            raise PolicyError(f"{request}: {num_tokens} tokens of {uncached}, or considered before")
        if self._num_seats <= 0:
            return self.hold_back(request, Verdict.STOP, "seats", f"all {self.max_num_seqs} are taken")
        if (budget := self._over_budget(own, self._considered.values())) is not None:
            return self.hold_back(request, Verdict.SKIP, budget.partition(":")[0], budget)
        num_new_tokens = uncached if self._capacity.reserves_prompt else num_tokens
        need_blocks = self.need_blocks(request, num_new_tokens)
        verdict = self._ask_capacity(request, need_blocks)
        detail = f"needs {need_blocks} blocks, {self._available_blocks} are available"
        if verdict is not Verdict.ADMIT:
            return self.hold_back(request, verdict, "capacity", detail)
        if need_blocks > self._available_blocks:
            return self.hold_back(request, Verdict.STOP, "blocks", detail)
        self._available_blocks -= need_blocks
        self._num_seats -= 1
        self._considered[request.seniority] = Admission(own, num_tokens, num_new_tokens)
        return verdict

    def place(self, request: RequestView, num_tokens: int) -> None:
        """Compute so many tokens of a request that was considered and may be admitted. Raises PolicyError."""
        self._expect_open()
        own, num_tokens = self._waits(request), operator.index(num_tokens)
        considered = self._considered.get(own.seniority)
        num_new_tokens = considered.num_new_tokens if considered else 0
        if not 1 <= num_tokens <= num_new_tokens or own.seniority in self._placed:
            raise PolicyError(
                f"{request}: {num_tokens} tokens, blocks are set aside for {num_new_tokens}; or in already"
            )
        self._spend(num_tokens)
        self._worker.binding_tokens += self.uncached_tokens(request) + ROW_COST_TOKENS
        self._placed[own.seniority] = Admission(own, num_tokens, num_new_tokens)

    def hold_back(self, request: RequestView, verdict: Verdict, reason: str, detail: str = "") -> Verdict:
        """Note why a request does not get in now, for `paceline explain`; returns the verdict."""
        self._held_back.append((self._waits(request), str(reason), str(detail)))
        return verdict

    def pause(self, victims: Iterable[Running]) -> None:
        """Take running sequences out, for recomputation. The composition starts over without them (raises Paused)."""
        if own := self.own(victims):
            raise Paused(own)

    # ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_empty(self) -> bool:
        return not (self.runs_decodes or self.runs_prefills)

    @property
    def runs_prefills(self) -> bool:
        return bool(self._chunks or self._placed)

    @property
    def runs_decodes(self) -> bool:
        return self.num_decoding > 0 if self._decodes is None else bool(self._decodes)

    @property
    def held_back(self) -> Sequence[tuple[Request, str, str]]:
        return tuple(self._held_back)

    def own(self, sequences: Iterable[Running]) -> list[Running]:
        """What a policy named, checked: running sequences of this step, each once. Raises PolicyError."""
        own: dict[int, Running] = {}
        for sequence in map(self._own, sequences):
            if sequence.slot in own:
                raise PolicyError(f"{sequence.request} is named twice")
            own[sequence.slot] = sequence
        return list(own.values())

    def close(self) -> None:
        """The composition is over. Raises the lack of blocks that a policy kept to itself."""
        self._open = False
        if self._lack is not None:
            raise self._lack

    def decision(self) -> Decision:
        generation = self._worker.slots.generation
        match self._growth:
            case []:
                growth = NONE
            case [growth]:
                pass
            case several:
                growth = np.concatenate(several)
        return Decision(
            growth=growth,
            growth_generations=generation[growth],
            decodes=self._decodes,
            chunks=[(slot, int(generation[slot]), tokens) for slot, tokens in self._chunks.items()],
            admissions=list(self._placed.values()),
            held_back=self._held_back,
        )

    def _expect_open(self) -> None:
        if not self._open or self._lack is not None:
            raise PolicyError("a decision after the composition has ended")

    def _ask_capacity(self, request: RequestView, need_blocks: int) -> Verdict:
        self._open = False  # its answer is all that it decides here
        try:
            verdict = self._capacity.admit(self, request, need_blocks)
        finally:
            self._open = True
        if not isinstance(verdict, Verdict):
            raise PolicyError(f"capacity: admit returned {verdict!r}, which is no Verdict")
        return verdict

    def _own(self, sequence: Running) -> Running:
        worker, slot = self._worker, sequence.slot if isinstance(sequence, Running) else -1
        request = worker.running.get(slot)
        if request is None or request is not sequence._request or slot in worker.finishing:
            raise PolicyError(f"{sequence!r} is no running sequence of this step")
        return Running(worker, slot, request)

    def _waits(self, request: RequestView) -> Request:
        own = self._offered.get(request) if isinstance(request, RequestView) else None
        if own is None:
            raise PolicyError(f"{request!r} is none of the requests that this step's `waiting` gave")
        return own

    def _spend(self, num_tokens: int) -> None:
        if num_tokens > self._budget_tokens:
            raise PolicyError(f"{num_tokens} tokens, with {self._budget_tokens} left in the budget")
        self._budget_tokens -= num_tokens

    def _grow(self, slots: Slots) -> None:
        if len(slots) > self._available_blocks:
            self._lack = OutOfBlocks(len(slots) - self._available_blocks)
            raise self._lack
        self._available_blocks -= len(slots)
        self._growth.append(slots)
