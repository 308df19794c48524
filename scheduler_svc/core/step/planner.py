"""One step of one worker: schedule it, let the cache grant its blocks, emit the plan.

A step reads top to bottom in `decide_step` (before the cache exchange) and `emit_plan` (after it).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np

from paceline.v1.cache_pb2 import CacheServiceLinkResponse
from paceline.v1.worker_pb2 import StepPlan, WorkerServiceLinkResponse
from scheduler_svc.core.arrays import packed
from scheduler_svc.core.cache.link import admit_result
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.policy.views import Paused, Running
from scheduler_svc.core.requests.phases import Event, Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.decision import Admitted, OutOfBlocks, PlannedAdmission
from scheduler_svc.core.workers.state import PendingStep, Prefill, PrefillChunk, StepInFlight, WorkerState, new_plan

# Reasons of a waiting request that preemption can remove.
ROOM = ("seats", "capacity", "blocks")
# Pauses of one worker between two tokens. Without a limit, a policy could pause every sequence it admits, for ever.
MAX_PAUSES = 64


@dataclass(frozen=True, slots=True)
class Planner:
    # arguments 2 to 4: PreemptionPolicy.requeue, .mode, and the reason
    preempt: Callable[[Request, str, str, str], None]
    over_budget: Callable[[WorkerState, Request, Admitted], str | None]
    session_index: Callable[[Request], int]
    resumed: Callable[[Request], None]  # a swapped-out request is in a slot again
    commit: Callable[[int, bytes, int], None]  # sequence, new tokens, number of tokens that the sent plans compute

    # ── before the exchange ──────────────────────────────────────────────────────────────────────────────────────────

    def decide_step(
        self, worker: WorkerState, policies: Policies, waiting: Callable[[], Iterator[Request]], now_s: float
    ) -> Step | None:
        """Schedule the next step of `worker`; it may be empty. `waiting` gives the requests that the step may admit, in
        order.

        Returns None if a sequence was preempted: its blocks come back with the next exchange, and then the step is
        scheduled again. Raises whatever a policy raises.
        """
        step = self._apply_policies(worker, policies, waiting, now_s)
        if step is not None and (torn := self._torn_samples(worker, policies, step)):
            # no request passes a torn group
            before = partial(takewhile, lambda request: id(request.samples) not in torn)
            step = self._apply_policies(worker, policies, lambda: before(waiting()), now_s)
        if step is None or self._preempt_for_waiting(worker, policies, step):
            return None
        self._expect_progress(worker, step)
        return step

    def decide_retry_step(
        self, worker: WorkerState, policies: Policies, waiting: Callable[[], Iterator[Request]], now_s: float
    ) -> Step | None:
        """As decide_step, for a retry step, which leaves out most of what could run."""
        return self._apply_policies(worker, policies, waiting, now_s)

    def _apply_policies(
        self, worker: WorkerState, policies: Policies, waiting: Callable[[], Iterator[Request]], now_s: float
    ) -> Step | None:
        worker.allocating_tokens = 0
        shares = policies.batch.shares_in_step
        over_budget = partial(self.over_budget, worker)
        step = Step(worker, waiting, policies.capacity, now_s, over_budget, policies.order, shares)
        try:
            policies.capacity.begin(step)
            policies.batch.schedule(step)
            step.close()
        except OutOfBlocks as lack:
            self._make_room(worker, policies, step, lack.shortfall_blocks)
            return None
        except Paused as paused:
            worker.num_pauses += 1
            if worker.num_pauses > MAX_PAUSES:
                times = f"{worker.num_pauses} times without a token in between"
                raise PolicyError(f"capacity: running sequences were paused {times}") from None
            for victims in self._units(worker, policies, step, step.own(paused.victims)):
                self._preempt_unit(worker, victims, policies)
            return None
        return step

    @staticmethod
    def _torn_samples(worker: WorkerState, policies: Policies, step: Step) -> set[int]:
        """Groups of samples (by id) that the step tears: it takes some of a group back from host memory and leaves
        others there. Only in mode "auto". Blocks that the samples shared are held once for each sample now, so a group
        may need more than the pool has. Where nothing runs, the step resumes a part of it."""
        if not (worker.swapped and policies.preemption.mode == "auto" and (worker.running or worker.in_flight)):
            return set()
        back = {admission.request.arrival_index for admission in step._decision().admissions}
        ids = {True: set[int](), False: set[int]()}
        for request in worker.swapped.values():
            if request.samples:
                ids[request.arrival_index in back].add(id(request.samples))
        return ids[True] & ids[False]

    @staticmethod
    def _expect_progress(worker: WorkerState, step: Step) -> None:
        """Raise PolicyError if the worker is idle, a request could run, and the policies give no reason why it does
        not."""
        if not step.is_empty or worker.in_flight or step.preempted:
            return
        if step.running or not (step.rejected or next(step.waiting(), None) is None):
            raise PolicyError("batch: the step is empty, though a request could run, and no reason is given")

    def _make_room(self, worker: WorkerState, policies: Policies, step: Step, shortfall_blocks: int) -> None:
        """Preempt until the shortfall is covered. This is an estimate: another sequence may still use a victim's shared
        blocks.

        A sequence that runs alone and still has no room holds some blocks twice: its own, and equal ones that were
        stored before. It is preempted itself. When it comes back it shares the stored blocks, and then it fits.
        """
        if worker.parked:
            return  # parked beams are freed first: a fork without its parent computes a few tokens again
        victims = step.own(policies.preemption.victims(step))
        if not victims and len(step.running) > 1:
            raise PolicyError("preemption: the policy names no victim")
        if len(victims) >= len(step.running):
            victims.pop()
        if not victims and not worker.in_flight:
            victims = list(step.running)
        for unit in self._units(worker, policies, step, victims):
            for victim in unit:
                # the blocks that it asked for are not needed either
                shortfall_blocks -= victim.num_blocks + step.growth_of(victim)
            self._preempt_unit(worker, unit, policies)
            if shortfall_blocks <= 0:
                break

    @staticmethod
    def _units(worker: WorkerState, policies: Policies, step: Step, victims: list[Running]) -> Iterator[list[Running]]:
        """The victims one by one. In mode "auto", each victim takes all running samples of its prompt along (a sequence
        group of vLLM V0), unless nothing would be left to run."""
        left = {sequence.slot: (sequence, worker.running[sequence.slot].samples) for sequence in step.running}
        for victim in victims:
            if victim.slot not in left:
                continue  # it was preempted with its group
            samples, unit = left[victim.slot][1], [victim]
            if samples and policies.preemption.mode == "auto":
                group = [sequence for sequence, of in left.values() if of is samples]
                unit = group[::-1] if len(group) < len(left) else unit
            for sequence in unit:
                del left[sequence.slot]
            yield unit

    def _preempt_for_waiting(self, worker: WorkerState, policies: Policies, step: Step) -> bool:
        """Preempt sequences for a waiting request, if the policy names any. The next step runs without them and admits
        nothing, so that there is progress in between."""
        refused = any(reason in ROOM for _, reason, _ in step._rejected)
        if not (refused and worker.num_further) or step.num_admissions or step.preempted:
            return False
        victims = step.own(policies.preemption.for_waiting(step))
        if len(victims) >= len(step.running):
            victims = victims[:-1]
        for victim in victims:
            self._preempt_victim(
                worker, victim, policies.preemption.requeue, "recompute", "gave way to a waiting request"
            )
        return bool(victims)

    def _preempt_unit(self, worker: WorkerState, victims: list[Running], policies: Policies) -> None:
        requeue, mode = policies.preemption.requeue, policies.preemption.mode
        for victim in victims:
            self._preempt_victim(worker, victim, requeue, mode, "gave its blocks to what runs")

    def _preempt_victim(self, worker: WorkerState, victim: Running, requeue: str, mode: str, why: str) -> None:
        request = worker.running[victim.slot]
        worker.preempted.append(request)
        self.preempt(request, requeue, mode, why)
        worker.knows_cache = False

    # ── after the exchange ───────────────────────────────────────────────────────────────────────────────────────────

    def emit_plan(
        self,
        worker: WorkerState,
        pending_step: PendingStep,
        response: CacheServiceLinkResponse | None,
        extend: int,
        admits: Sequence[int],
    ) -> WorkerServiceLinkResponse | None:
        """Build the plan, with the blocks that the cache granted. None if nothing is left to run.

        `extend` and `admits` are the indexes of the pending step's operations in `response`.
        """
        decision = pending_step.decision
        message = new_plan(worker)
        plan = message.plan
        worker.allocating_tokens = 0
        if len(decision.growth):
            assert response is not None, "growth needs an exchange"
            self._grow(worker, pending_step, response, extend, plan)
        self._choose_decodes(worker, decision.decodes, plan)
        generation = worker.slots.generation
        lost = pending_step.decision.shares and self._has_lost(worker, pending_step)
        sizes = {slot: size for slot, gen, size in decision.chunks if generation[slot] == gen}
        for admission, index in zip(decision.admissions, admits, strict=True):
            assert response is not None, "an admission needs an exchange"
            if lost and (granted := admit_result(response, index)) is not None and granted.shares_planned:
                continue  # the caller requeues the request
            self._fill_slot(worker, admission, response, index, plan, sizes)
        return message if self._run(worker, plan, sizes) else None

    @staticmethod
    def _has_lost(worker: WorkerState, pending_step: PendingStep) -> bool:
        """Whether a sequence that the step computes tokens for has ended since the step was scheduled."""
        generation = worker.slots.generation
        ended = any(admission.request.phase is Phase.ENDED for admission in pending_step.decision.admissions)
        return ended or any(generation[slot] != gen for slot, gen, _ in pending_step.decision.chunks)

    def _grow(
        self,
        worker: WorkerState,
        pending_step: PendingStep,
        response: CacheServiceLinkResponse,
        extend: int,
        plan: StepPlan,
    ) -> None:
        slots, blocks = pending_step.decision.growth, response.results[extend].extend.block_ids
        if worker.slots.num_releases != pending_step.num_releases:
            # A sequence that ended during the exchange was freed together with its new block.
            alive = worker.slots.generation[slots] == pending_step.decision.growth_generations
            slots, blocks = slots[alive], np.frombuffer(blocks, np.int32)[alive].tobytes()
        packed_slots = slots.astype(np.int32).tobytes()
        plan.grow_slots, plan.grow_blocks = packed_slots, blocks
        worker.grow(slots)
        worker.slots.note_growth(packed_slots, blocks)

    def _choose_decodes(self, worker: WorkerState, chosen: list[int] | None, plan: StepPlan) -> None:
        """Hold the decoding sequences that were not chosen, and resume the chosen ones. A step without decodes does
        neither."""
        if chosen == []:
            plan.skip_decodes = worker.num_decoding > 0
            return
        wanted = None if chosen is None else set(chosen)
        resumed = [slot for slot in worker.held if wanted is None or slot in wanted]
        held = []
        if wanted is not None:
            held = [slot for slot in worker.slots.decode_rows().slots.tolist() if slot not in wanted]
        for slot in held:
            worker.hold(slot)
        for slot in resumed:
            worker.resume(slot)
        if held or resumed:
            plan.hold_slots = packed(held)
            plan.resume_slots = packed(resumed)

    def _fill_slot(
        self,
        worker: WorkerState,
        admission: PlannedAdmission,
        response: CacheServiceLinkResponse,
        index: int,
        plan: StepPlan,
        sizes: dict[int, int],
    ) -> None:
        request = admission.request
        granted = admit_result(response, index)
        if granted is None or request.phase is Phase.ENDED:
            return  # the caller requeues the request, or frees its blocks
        num_cached_tokens, block_table = granted.num_cached_tokens, granted.block_table
        slot = worker.slots.occupy(request, self.session_index(request), len(block_table) // 4)
        request.advance(Event.GRANT)
        request.worker, request.slot = worker.id, slot
        request.block_table = array("i", block_table)
        if request.cached_tokens is None:
            request.cached_tokens = num_cached_tokens
        worker.running[slot] = request
        worker.num_further += request.is_further_sequence
        worker.prefills[slot] = Prefill(slot, request.num_tokens, num_cached_tokens)
        # The cache may hold more of the prompt now than when the step was scheduled.
        sizes[slot] = min(admission.num_tokens, request.num_tokens - num_cached_tokens)
        if request.swapped_on:
            swap = response.results[index].swap_in
            plan.swap_in_from += swap.host_blocks
            plan.swap_in_to += swap.device_blocks
            self.resumed(request)
        elif granted.host_blocks:
            plan.swap_in_from += granted.host_blocks
            plan.swap_in_to += granted.device_blocks
        if copy_from := granted.copy_from:
            plan.copy_from += copy_from.to_bytes(4, "little")
            at = 4 * (num_cached_tokens // worker.block_size)  # the first token that is not cached
            plan.copy_to += block_table[at : at + 4]
        # filled in place: passing a message copies it, which costs more than the rest of this function
        new = plan.new_sequences.add()
        new.slot, new.token_ids, new.block_table = slot, request.token_ids, block_table
        new.num_prompt_tokens, new.num_cached_tokens = request.num_prompt_tokens, num_cached_tokens
        new.sampling.CopyFrom(request.sampling)
        new.request_id, new.cache_salt = request.request_id, request.cache_salt

    def _run(self, worker: WorkerState, plan: StepPlan, sizes: dict[int, int]) -> bool:
        """Record the rows as in flight. Returns whether there are any."""
        slots = worker.slots
        rows = slots.no_rows() if plan.skip_decodes else slots.decode_rows()
        chunks = [self._chunk(worker, slot, size) for slot, size in sizes.items()]
        if not (len(rows) or chunks):
            self._withdraw(worker, plan)
            return False
        if chunks:
            plan.prefill_slots = packed(chunk.slot for chunk in chunks)
            plan.prefill_tokens = packed(sizes.values())
        worker.add_swap_outs(plan)
        sampled = len(rows) + sum(chunk.samples for chunk in chunks)
        step = StepInFlight(
            step=plan.step,
            rows=rows,
            decode_step=worker.decode_step,
            num_releases=slots.num_releases,
            chunks=tuple(chunks),
            num_sampled=sampled,
            new_tokens=sum(sizes.values()),
            context_tokens=rows.base_tokens + len(rows) * worker.decode_step,
        )
        worker.in_flight.append(step)
        if len(rows):
            self._advance_decodes(worker)
        for chunk in chunks:
            self._advance_prefill(worker, chunk)
        return True

    def _chunk(self, worker: WorkerState, slot: int, size: int) -> PrefillChunk:
        prefill = worker.prefills[slot]
        return PrefillChunk(slot, int(worker.slots.generation[slot]), prefill.num_planned + size, prefill.num_tokens)

    def _advance_decodes(self, worker: WorkerState) -> None:
        step = worker.decode_step
        worker.decode_step += 1
        if worker.last_steps.is_due(step):
            for slot in worker.last_steps.due(step, worker.slots).tolist():
                worker.finish_sending(slot)
            worker.last_steps.discard(step)

    def _advance_prefill(self, worker: WorkerState, chunk: PrefillChunk) -> None:
        """The cache hears of the commit at once. A request that is admitted next runs in a later step, when the blocks
        are written."""
        request = worker.running[chunk.slot]
        request.num_committed = chunk.num_computed
        self.commit(request.sequence, b"", chunk.num_computed)
        worker.prefills[chunk.slot].num_planned = chunk.num_computed
        if not chunk.samples:
            return
        del worker.prefills[chunk.slot]
        if chunk.num_tokens + 1 < worker.running[chunk.slot].max_total_tokens:
            worker.begin_decoding(chunk.slot, chunk.num_tokens + 1)
        else:
            worker.finish_sending(chunk.slot)

    def _withdraw(self, worker: WorkerState, plan: StepPlan) -> None:
        """Undo the plan: every sequence in it has ended since."""
        worker.steps_sent -= 1
        worker.frees[:0] = np.frombuffer(plan.free_slots, np.int32).tolist()
        for slot in np.frombuffer(plan.hold_slots, np.int32).tolist():
            worker.resume(slot)
        assert not plan.new_sequences, "a new sequence has something to run"
