"""One step of one worker, while policies compose it: what they see, and what they may decide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.policy import CapacityPolicy, PolicyError, Verdict
from scheduler_svc.core.request import TOKEN_BYTES, Request
from scheduler_svc.core.slots import Longs, Slots
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


class Running:
    """A sequence that holds a slot of the step's worker, as policies see it. Steps in flight count as done."""

    __slots__ = ("_worker", "request", "slot")

    def __init__(self, worker: Worker, slot: int, request: Request) -> None:
        self._worker = worker
        self.slot = slot
        self.request = request

    @property
    def is_decoding(self) -> bool:
        return self.slot not in self._worker.prefills

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self._worker.num_tokens(self.slot)

    @property
    def num_computed_tokens(self) -> int:
        prefill = self._worker.prefills.get(self.slot)
        return prefill.num_planned if prefill else self.num_tokens - 1

    @property
    def remaining_tokens(self) -> int:
        """To be computed before it samples again: 1 when it decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        return int(self._worker.slots.capacity[self.slot]) // self._worker.block_size


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


class Step:
    """Policies read the attributes and call the methods under "decisions"; everything counts what is decided so far."""

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
        self.now_s = now_s
        self.preempted: Sequence[Request] = tuple(worker.preempted)
        self.block_size = worker.block_size
        self.total_blocks = worker.num_blocks
        self.max_batched_tokens: int = worker.registration.max_batched_tokens
        self.available_blocks = worker.available_blocks
        self.budget_tokens = self.max_batched_tokens
        self.num_running = len(worker.running)  # that hold a slot
        self.num_departed = worker.num_departed  # that ever left this worker
        seats = worker.slots.num_slots if not max_num_seqs else min(max_num_seqs, worker.slots.num_slots)
        self.num_seats = min(worker.slots.num_free, seats - self.num_running)
        self.max_num_seqs = seats
        self.worker_id = worker.id
        self._worker = worker
        self._waiting = waiting
        self._capacity = capacity
        self._over_budget = over_budget
        self._growth: list[Slots] = []
        self._decodes: list[int] | None = []
        self._chunks: dict[int, int] = {}
        self._considered: dict[int, Admission] = {}  # by seniority
        self.admissions: list[Admission] = []
        self.held_back: list[tuple[Request, str, str]] = []

    # ── what policies see ────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def running(self) -> list[Running]:
        """What can run, in order of admission. Costs time in proportion; steady steps need not look."""
        worker = self._worker
        return [Running(worker, slot, r) for slot, r in worker.running.items() if slot not in worker.finishing]

    @property
    def prefills(self) -> list[Running]:
        """Running sequences whose known tokens are not all computed, in order of admission."""
        worker = self._worker
        return [Running(worker, slot, worker.running[slot]) for slot in worker.prefills]

    @property
    def num_decoding(self) -> int:
        """Running sequences that want one token."""
        return self._worker.num_decoding

    def waiting(self) -> Iterator[Request]:
        """Requests that could be bound to this worker, in the order's order."""
        return self._waiting()

    def cached_tokens(self, request: Request) -> int:
        """What this worker has in its cache of a waiting request: whole blocks, never the last token."""
        return request.matched_tokens(self.worker_id)

    def uncached_tokens(self, request: Request) -> int:
        return request.num_tokens - request.matched_tokens(self.worker_id)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def need_blocks(self, request: Request, num_new_tokens: int) -> int:
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

    @property
    def capacity_is_spent(self) -> bool:
        """Whether the capacity policy knows already that it will admit nobody else."""
        return self._capacity.is_spent(self)

    def another_computes_prefix_of(self, request: Request, others: Iterable[Request] = ()) -> bool:
        """Whether something that runs, or was let in before it in this step, or is one of `others`, is just computing
        the first block of the request that is not cached. Then it pays to wait (TensorRT-LLM's prefix-aware
        scheduling)."""
        wanted = self.cached_tokens(request) + self.block_size
        if wanted > request.num_tokens or not self._worker.prefix_caching:
            return False
        beginning = request.token_ids[: wanted * TOKEN_BYTES]
        computing = [sequence.request for sequence in self.prefills]
        if wanted < request.num_tokens:  # else that block may well be cached, and not reused for its last token
            computing += [*(admission.request for admission in self._considered.values()), *others]
        return any(other.token_ids.startswith(beginning) for other in computing)

    def _live_tokens(self, request: Request) -> int:
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

    def run_decodes(self) -> None:
        """Everything that decodes gets its token. Raises OutOfBlocks; PolicyError if the token budget is too small."""
        if self._decodes:
            raise PolicyError("run_decodes after run of a decoding sequence")
        self._decodes = None
        self._spend(self.num_decoding)
        growing = self._worker.growing_slots()
        if len(growing):
            self._grow(growing)

    def run(self, sequence: Running, num_tokens: int) -> None:
        """Compute so many of its remaining tokens. Raises OutOfBlocks, PolicyError."""
        slot = sequence.slot
        if self._worker.running.get(slot) is not sequence.request or slot in self._chunks:
            raise PolicyError(f"run: {sequence.request.request_id} does not run, or is in the step already")
        if not 1 <= num_tokens <= sequence.remaining_tokens:
            raise PolicyError(f"run: {num_tokens} tokens of {sequence.remaining_tokens} that remain")
        if sequence.is_decoding:
            if self._decodes is None or slot in self._decodes:
                raise PolicyError(f"run: {sequence.request.request_id} is in the step already")
            self._decodes.append(slot)
        else:
            self._chunks[slot] = num_tokens
        self._spend(num_tokens)
        missing = self.blocks_for(sequence.num_computed_tokens + num_tokens) - sequence.num_blocks
        if missing > 0:
            self._grow(np.full(missing, slot, np.int32))

    def admit(self, request: Request, num_tokens: int) -> Verdict:
        """Offer a waiting request a place, with so many of its uncached tokens to compute in this step.

        Raises PolicyError if that is more than it has, or than the budget has left.
        """
        verdict = self.consider(request, num_tokens)
        if verdict is Verdict.ADMIT:
            self.place(request, num_tokens)
        return verdict

    def consider(self, request: Request, num_tokens: int) -> Verdict:
        """Whether a waiting request may have a seat, and blocks for so many of its uncached tokens. They are set aside
        for it; who is not placed after all gives them back when the step ends. Raises PolicyError."""
        uncached = self.uncached_tokens(request)
        if not 1 <= num_tokens <= uncached or request.seniority in self._considered:
            raise PolicyError(f"{request.request_id}: {num_tokens} tokens of {uncached}, or considered before")
        if self.num_seats <= 0:
            return self.hold_back(request, Verdict.STOP, "seats", f"all {self.max_num_seqs} are taken")
        if (budget := self._over_budget(request, self._considered.values())) is not None:
            return self.hold_back(request, Verdict.SKIP, budget.partition(":")[0], budget)
        num_new_tokens = uncached if self._capacity.reserves_prompt else num_tokens
        need_blocks = self.need_blocks(request, num_new_tokens)
        verdict = self._capacity.admit(self, request, need_blocks)
        detail = f"needs {need_blocks} blocks, {self.available_blocks} are available"
        if verdict is not Verdict.ADMIT:
            return self.hold_back(request, verdict, "capacity", detail)
        if need_blocks > self.available_blocks:
            return self.hold_back(request, Verdict.STOP, "blocks", detail)
        self.available_blocks -= need_blocks
        self.num_seats -= 1
        self._considered[request.seniority] = Admission(request, num_tokens, num_new_tokens)
        return verdict

    def place(self, request: Request, num_tokens: int) -> None:
        """Compute so many tokens of a request that was considered and may be admitted. Raises PolicyError."""
        considered = self._considered.get(request.seniority)
        num_new_tokens = considered.num_new_tokens if considered else 0
        if not 1 <= num_tokens <= num_new_tokens:
            raise PolicyError(f"{request.request_id}: {num_tokens} tokens, blocks are set aside for {num_new_tokens}")
        self._spend(num_tokens)
        self._worker.binding_tokens += self.uncached_tokens(request) + ROW_COST_TOKENS
        self.admissions.append(Admission(request, num_tokens, num_new_tokens))

    def hold_back(self, request: Request, verdict: Verdict, reason: str, detail: str = "") -> Verdict:
        """Note why a request does not get in now, for `paceline explain`; returns the verdict."""
        self.held_back.append((request, reason, detail))
        return verdict

    def pause(self, victims: list[Running]) -> None:
        """Take running sequences out, for recomputation. The composition starts over without them (raises Paused)."""
        if victims:
            raise Paused(victims)

    # ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_empty(self) -> bool:
        return not (self.runs_decodes or self.runs_prefills)

    @property
    def runs_prefills(self) -> bool:
        return bool(self._chunks or self.admissions)

    @property
    def runs_decodes(self) -> bool:
        return self.num_decoding > 0 if self._decodes is None else bool(self._decodes)

    def decision(self) -> Decision:
        generation = self._worker.slots.generation
        growth = np.concatenate(self._growth) if self._growth else np.zeros(0, np.int32)
        return Decision(
            growth=growth,
            growth_generations=generation[growth],
            decodes=self._decodes,
            chunks=[(slot, int(generation[slot]), tokens) for slot, tokens in self._chunks.items()],
            admissions=self.admissions,
            held_back=self.held_back,
        )

    def _spend(self, num_tokens: int) -> None:
        if num_tokens > self.budget_tokens:
            raise PolicyError(f"{num_tokens} tokens, with {self.budget_tokens} left in the budget")
        self.budget_tokens -= num_tokens

    def growth_of(self, sequence: Running) -> int:
        """Blocks that the step has asked for on its behalf."""
        return sum(int(np.count_nonzero(slots == sequence.slot)) for slots in self._growth)

    def _grow(self, slots: Slots) -> None:
        self._growth.append(slots)
        if len(slots) > self.available_blocks:
            raise OutOfBlocks(len(slots) - self.available_blocks)
        self.available_blocks -= len(slots)
