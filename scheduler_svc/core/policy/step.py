"""One step of one worker while policies schedule it: the decisions that they can make."""

from __future__ import annotations

import enum
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from scheduler_svc.core.arrays import Slots
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.core.policy.step_view import StepView
from scheduler_svc.core.policy.views import Paused, Running
from scheduler_svc.core.requests.request import Request, RequestView, view_of
from scheduler_svc.core.workers.block_boundaries import NONE
from scheduler_svc.core.workers.steps import MAX_PLAN_BYTES, Decision, OutOfBlocks, PlannedAdmission, plan_bytes


class Verdict(enum.Enum):
    """What a waiting request gets in this step."""

    ADMIT = "admit"
    SKIP = "skip"  # not now; other requests may pass it
    STOP = "stop"  # not now, and no request may pass it


class CapacityPolicy(ABC):
    """Decides which requests may hold blocks."""

    # Whether an admitted request takes blocks for all its known tokens at once, and not chunk by chunk.
    reserves_prompt: ClassVar[bool] = False
    # Whether a waiting request may preempt a running one, so that it is looked at even if every slot is taken.
    preempts_for_waiting: ClassVar[bool] = False

    def begin(self, step: Step) -> None:  # noqa: B027
        """Called once before each schedule. May call `step.pause`."""

    def planned(self, step: Step) -> None:  # noqa: B027
        """The step is accepted. What is in `step` will run, unless the cache has too few blocks for it after all."""

    def is_spent(self, step: Step) -> bool:
        """Whether it is certain that no other request will be admitted in this schedule."""
        return False

    @abstractmethod
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """Whether a waiting request may have `need_blocks` now, and what that means for the requests behind it.

        There is a slot for it. `need_blocks <= step.available_blocks` has not been checked.
        """


@dataclass(slots=True, eq=False, repr=False)
class Step(StepView):
    """Policies read the attributes and call the methods under "decisions". Every counter includes the decisions made so
    far.

    No policy can bring about an impossible step: attributes are read-only, a decision is checked before it changes
    anything, and no decision is taken after the schedule has ended.
    """

    _capacity: CapacityPolicy
    # The offline requests of the same worker step. None: no offline request runs in it.
    _offline_part: Step | None = field(default=None, init=False)

    @property
    def capacity_is_spent(self) -> bool:
        """Whether the capacity policy is certain that it will admit no other request."""
        return self._capacity.is_spent(self)

    # ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    # A lack of blocks ends the schedule, even if the policy catches the exception.

    def run_decodes(self) -> None:
        """Run all decoding sequences. Raises OutOfBlocks, and PolicyError if the token budget is too small or a
        decoding sequence is in the step already."""
        self._expect_open()
        if self._decodes != []:
            raise PolicyError("run_decodes after run or run_decodes of a decoding sequence")
        self._spend(self.num_decoding)
        self._decodes = None
        growing = self._growing_slots() if self._num_hidden else self._worker.batch.growing_slots()
        if len(growing):
            self._grow(growing)

    def run(self, sequence: Running, num_tokens: int) -> None:
        """Compute this many of the sequence's remaining tokens. Raises OutOfBlocks, PolicyError."""
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
            self._computing.add(self._worker.batch.running[slot], sequence.num_computed_tokens + num_tokens)
            self._credit_of = None
        missing = self.blocks_for(sequence.num_computed_tokens + num_tokens) - sequence.num_blocks
        if missing > 0:
            self._grow(np.full(missing, slot, np.intp))

    def admit(self, request: RequestView, num_tokens: int) -> Verdict:
        """Offer a waiting request a slot, to compute this many of its uncached tokens in this step.

        Raises PolicyError if the request has fewer uncached tokens, the budget has fewer tokens left, or the request
        was offered before in this schedule.
        """
        verdict = self.consider(request, num_tokens)
        if verdict is Verdict.ADMIT:
            self._place(self._considered[request._request.arrival_index])
        return verdict

    def consider(self, request: RequestView, num_tokens: int) -> Verdict:
        """Whether a waiting request may have a slot, and blocks for this many of its uncached tokens. If so, the slot
        and the blocks are reserved for it in this schedule, even if it is not placed. Raises PolicyError."""
        self._expect_open()
        own, num_tokens = self._waits(request), operator.index(num_tokens)
        request, uncached = view_of(own), own.num_tokens - self.cached_tokens(own)
        if not 1 <= num_tokens <= uncached or own.arrival_index in self._considered:
            raise PolicyError(f"{request}: considered before, or {num_tokens} tokens of {uncached} uncached ones")
        if self._num_free_slots <= 0:
            return self.reject(request, Verdict.STOP, "slots", f"all {self.max_num_seqs} are taken")
        if self._budgeted.num_bytes and self._budgeted.num_bytes + plan_bytes(own) > MAX_PLAN_BYTES:
            detail = f"{self._budgeted.num_bytes} bytes of sequences are in it; at most {MAX_PLAN_BYTES} are possible"
            return self.reject(request, Verdict.STOP, "plan", detail)
        if (budget := self._over_budget(own, self._budgeted)) is not None:
            name, _, detail = budget.partition(": ")
            if name == "lora":
                self._full_loras.add(own.metadata.lora)
            return self.reject(request, Verdict.SKIP, name, detail)
        num_new_tokens = uncached if self._capacity.reserves_prompt else num_tokens
        need_blocks = self._need_blocks(own, num_new_tokens)
        verdict = self._ask_capacity(request, need_blocks)
        if verdict is not Verdict.ADMIT or need_blocks > self._available_blocks:
            detail = f"needs {need_blocks} blocks, {self._available_blocks} are available"
            if verdict is not Verdict.ADMIT:
                if need_blocks <= self._available_blocks:  # the blocks are free, but promised or needed later
                    detail += f"; it may need {self.blocks_for(own.max_total_tokens)} until its end"
                return self.reject(request, verdict, "capacity", detail)
            return self.reject(request, Verdict.STOP, "blocks", detail)
        self._available_blocks -= need_blocks
        self._num_free_slots -= 1
        self._considered[own.arrival_index] = PlannedAdmission(own, num_tokens, num_new_tokens, uncached)
        self._arriving.add(own, own.num_tokens)
        self._budgeted.add(own)
        return verdict

    def place(self, request: RequestView, num_tokens: int) -> None:
        """Compute this many tokens of a request that was considered and may be admitted. Raises PolicyError."""
        self._expect_open()
        own, num_tokens = self._waits(request), operator.index(num_tokens)
        considered = self._considered.get(own.arrival_index)
        num_new_tokens = considered.num_new_tokens if considered else 0
        if considered is None or not 1 <= num_tokens <= num_new_tokens or own.arrival_index in self._placed:
            raise PolicyError(
                f"{request}: placed before, or {num_tokens} tokens with blocks reserved for {num_new_tokens}"
            )
        same = num_tokens == considered.num_tokens
        self._place(considered if same else considered._replace(num_tokens=num_tokens))

    def _place(self, admission: PlannedAdmission) -> None:
        request = admission.request
        self._spend(admission.num_tokens)
        self._worker.allocating_tokens += admission.num_uncached_tokens
        self._placed[request.arrival_index] = admission
        num_computed = request.num_tokens - admission.num_uncached_tokens + admission.num_tokens
        self._computing.add(request, num_computed)
        self._credit_of = None

    def reject(self, request: RequestView, verdict: Verdict, reason: str, detail: str = "") -> Verdict:
        """Note why a request is not admitted in this step, for `paceline explain`. Returns the verdict."""
        if not self._open:
            raise PolicyError("reject after the schedule has ended")
        self._rejected.append((self._waits(request), str(reason), str(detail)))
        return verdict

    def reject_all(self, reason: str, detail: str = "") -> None:
        """Note, for `paceline explain`, why the step offers no waiting request a slot and looks at none."""
        self._expect_open()
        self._closed = str(reason), str(detail)

    def pause(self, victims: Iterable[Running]) -> None:
        """Preempt running sequences, as the preemption policy's `requeue` and `mode` say. Raises Paused: the step is
        scheduled again without them. Does nothing if `victims` is empty."""
        if own := self._own_all(victims):
            raise Paused(own)

    # ── the result ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs in the step so far."""
        return not (self.runs_decodes or self.runs_prefills)

    @property
    def _runs_nothing(self) -> bool:
        """Whether no request of either class runs in the worker's step."""
        return self.is_empty and (self._offline_part is None or self._offline_part.is_empty)

    @property
    def _left_blocks(self) -> int:
        """Available blocks that no request of either class takes in the worker's step."""
        if self._offline_part is not None:
            return self._offline_part._available_blocks
        return self._available_blocks - self._lent_blocks

    @property
    def runs_prefills(self) -> bool:
        """Whether the step computes tokens of a prompt, or admits a request."""
        return bool(self._chunks or self._placed)

    @property
    def runs_decodes(self) -> bool:
        """Whether the step computes a token for any decoding sequence."""
        return self.num_decoding > 0 if self._decodes is None else bool(self._decodes)

    @property
    def rejected(self) -> Sequence[tuple[RequestView, str, str]]:
        """Request, reason, detail: the requests that were looked at and are not admitted."""
        return tuple((view_of(request), reason, detail) for request, reason, detail in self._rejected)

    def _own_all(self, sequences: Iterable[Running]) -> list[Running]:
        """The sequences that a policy named, checked: running sequences of this step, each once. Raises PolicyError."""
        own: dict[int, Running] = {}
        for sequence in map(self._own, sequences):
            if sequence.slot in own:
                raise PolicyError(f"{sequence.request} is named twice")
            own[sequence.slot] = sequence
        return list(own.values())

    def _close(self) -> None:
        """The schedule has ended. Raises OutOfBlocks again if a policy has caught it."""
        self._open = False
        if self._lack is not None:
            raise self._lack

    def _decision(self) -> Decision:
        """The result of the schedule. It contains the requests themselves, which policies must not see."""
        generation = self._worker.batch.slots.generation
        match self._growth:
            case []:
                growth = NONE
            case [growth]:
                pass
            case several:
                growth = np.concatenate(several)
        decision = Decision(
            growth=growth,
            growth_generations=generation[growth] if self._growth else NONE,
            decodes=self._decodes,
            chunks=[(slot, int(generation[slot]), tokens) for slot, tokens in self._chunks.items()],
            admissions=list(self._placed.values()),
            shares=self._shares,
            rejected=self._rejected,
            closed=self._closed,
        )
        if self._offline_part is None and (self._offline or not self._worker.batch.offline):
            return decision
        return self._with_offline_part(decision)

    def _with_offline_part(self, online: Decision) -> Decision:
        """The decision for the requests of both classes."""
        decodes = self._all_decodes()
        if self._offline_part is None:
            return online._replace(decodes=decodes)
        offline = self._offline_part._decision()
        return Decision(
            growth=np.concatenate((online.growth, offline.growth)),
            growth_generations=np.concatenate((online.growth_generations, offline.growth_generations)),
            decodes=decodes,
            chunks=online.chunks + offline.chunks,
            admissions=online.admissions + offline.admissions,
            shares=online.shares,
            rejected=online.rejected + offline.rejected,
            closed=online.closed,
        )

    def _all_decodes(self) -> list[int] | None:
        """The slots that decode, of both classes. None: all of them."""
        batch, decodes = self._worker.batch, self._decodes
        others = self._offline_part._decodes if self._offline_part is not None else []
        if not batch.num_decoding_of(True):
            return decodes
        if not batch.num_decoding_of(False):
            return others
        if decodes is None and others is None:
            return None
        own = batch.decoding_slots(False) if decodes is None else decodes
        return own + (batch.decoding_slots(True) if others is None else others)

    def _lend(self, num_blocks: int) -> None:
        """Online requests can take these blocks of offline sequences."""
        self._lent_blocks = num_blocks
        self._available_blocks += num_blocks

    def _follow(self, online: Step, max_tokens: int) -> None:
        """Offline requests get what the online part of the step leaves. If online requests run in the step, offline
        requests get at most `max_tokens` tokens."""
        left = online._budget_tokens if online.is_empty else min(online._budget_tokens, max_tokens)
        self._budget_tokens = self._max_batched_tokens = left
        self._available_blocks = online._available_blocks - online._lent_blocks
        self._num_free_slots = online._num_free_slots - online._num_hidden
        self._shares = self._shares and online._shares
        self._budgeted.num_bytes = online._budgeted.num_bytes
        self._budgeted.loras |= online._budgeted.loras

    def _lacking_adapters(self) -> set[str]:
        """Adapters of offline sequences that have to leave the batch before the step's admissions fit."""
        adapters, loras = self._worker.adapters, self._budgeted.loras
        excess = len(adapters.num_bound.keys() | loras) - adapters.limit
        if not loras or excess <= 0:
            return set()
        online = {one.metadata.lora for one in self._worker.bound if not one.metadata.offline}
        return set(sorted(adapters.num_bound.keys() - online - loras)[:excess])

    def _expect_open(self) -> None:
        if not self._open:
            raise PolicyError("a decision after the schedule has ended")

    def _ask_capacity(self, request: RequestView, need_blocks: int) -> Verdict:
        self._open = False  # while it answers, it makes no other decision
        try:
            verdict = self._capacity.admit(self, request, need_blocks)
        finally:
            self._open = True
        if not isinstance(verdict, Verdict):
            raise PolicyError(f"capacity: admit returned {verdict!r}, which is no Verdict")
        return verdict

    def _own(self, sequence: Running) -> Running:
        worker, slot = self._worker, sequence.slot if isinstance(sequence, Running) else -1
        request = worker.batch.running.get(slot)
        if request is None or request is not sequence._request or slot in worker.batch.finishing:
            raise PolicyError(f"{sequence!r} is no running sequence of this step")
        return Running(worker, slot, request)

    def _waits(self, request: RequestView) -> Request:
        own = request._request if isinstance(request, RequestView) else None
        if own is None or self._offered.get(own.arrival_index) is not own:
            raise PolicyError(f"{request!r} is none of the requests that this step's `waiting` gave")
        return own

    def _spend(self, num_tokens: int) -> None:
        if num_tokens > self._budget_tokens:
            raise PolicyError(f"{num_tokens} tokens, with {self._budget_tokens} left in the budget")
        self._budget_tokens -= num_tokens

    def _growth_of(self, sequence: Running) -> int:
        """Blocks that the step has asked for on behalf of the sequence."""
        return sum(int(np.count_nonzero(slots == sequence.slot)) for slots in self._growth)

    def _grow(self, slots: Slots) -> None:
        self._growth.append(slots)
        if len(slots) > self._available_blocks:
            self._lack = OutOfBlocks(len(slots) - self._available_blocks)
            raise self._lack
        self._available_blocks -= len(slots)
