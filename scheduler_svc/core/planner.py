"""One step of one worker: draft it, let the cache grant its blocks, turn it into a plan.

A step reads top to bottom in `draft_step` (before the cache exchange) and `finish_step` (after it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from paceline.v1.cache_pb2 import CacheServiceLinkResponse
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from scheduler_svc.core.cache_link import admit_result
from scheduler_svc.core.policy import Policies, PoolView
from scheduler_svc.core.request import Phase, Request
from scheduler_svc.core.worker import ROW_COST_TOKENS, Chunk, Draft, Prefill, StepInFlight, Worker, new_plan


@dataclass(frozen=True, slots=True)
class Planner:
    """`prefers` says whether a waiting request belongs to this worker rather than to another (late binding)."""

    policies: Policies
    prefers: Callable[[Request, Worker], bool]
    preempt: Callable[[Request], None]
    session_index: Callable[[Request], int]

    # ── before the exchange ──────────────────────────────────────────────────────────────────────────────────────────

    def draft_step(self, worker: Worker, waiting: Iterable[Request]) -> Draft | None:
        """What the next step of `worker` needs from the cache, or None if there is no step to make now."""
        growth = worker.growing_slots()
        if len(growth) > worker.available_blocks:
            self._make_room(worker, len(growth) - worker.available_blocks)
            return None  # the blocks come back with the next exchange; then the step is drafted anew
        admissions = self._admit(worker, waiting, len(growth))
        if not (admissions or worker.prefills or worker.slots.decoding.any()):
            return None
        return Draft(worker.id, growth, admissions)

    def _make_room(self, worker: Worker, shortfall_blocks: int) -> None:
        """Preempt until the shortfall is covered, as far as can be told: a victim's shared blocks may stay in use.

        A sequence that runs alone and still has no room holds blocks twice: its own, and the equal ones that others had
        stored before. It gives way to itself: when it comes back it shares them, and then it fits.
        """
        running = [request for slot, request in worker.running.items() if slot not in worker.finishing]
        victims = list(self.policies.capacity.victims(running))
        if not victims and not worker.in_flight:
            victims = running
        for victim in victims:
            shortfall_blocks -= int(worker.slots.capacity[victim.slot]) // worker.block_size
            self.preempt(victim)
            if shortfall_blocks <= 0:
                break
        worker.just_preempted = True

    def _admit(self, worker: Worker, waiting: Iterable[Request], growth_blocks: int) -> list[Request]:
        """Bind waiting requests, in order, while slots, blocks and the token budget last. The first that finds no room
        ends the search: nobody overtakes it for the resources it waits for."""
        admissions: list[Request] = []
        worker.binding_tokens = 0
        just_preempted, worker.just_preempted = worker.just_preempted, False
        if worker.draining or (just_preempted and worker.running):
            return admissions  # what was preempted must not come straight back for the blocks it gave up
        decodes = int(worker.slots.decoding.sum())
        budget = self.policies.batch.prefill_budget(worker.registration.max_batched_tokens, decodes)
        budget -= sum(prefill.remaining_tokens for prefill in worker.prefills.values())
        available = worker.available_blocks - growth_blocks
        for request in waiting:
            if budget <= 0 or len(admissions) == worker.slots.num_free:
                break
            if not (worker.can_ever_hold(request) and self.prefers(request, worker)):
                continue
            need = worker.need_blocks(request)
            view = PoolView(worker.num_blocks, available, len(worker.running) + len(admissions))
            if not self.policies.capacity.may_admit(view, need):
                break
            available -= need
            cost_tokens = request.num_tokens - request.matched_tokens(worker.id)
            budget -= cost_tokens
            worker.binding_tokens += cost_tokens + ROW_COST_TOKENS
            admissions.append(request)
        return admissions

    # ── after the exchange ───────────────────────────────────────────────────────────────────────────────────────────

    def finish_step(
        self, worker: Worker, draft: Draft, response: CacheServiceLinkResponse | None, extend: int, admits: list[int]
    ) -> StepPlan | None:
        """The plan, with the blocks the cache granted; None if nothing is left to run.

        `extend` and `admits` are the indexes of the draft's operations in `response`.
        """
        plan = new_plan(worker)
        worker.binding_tokens = 0
        if draft.growth:
            assert response is not None, "growth needs an exchange"
            self._grow(worker, draft, response, extend, plan)
        for request, index in zip(draft.admissions, admits, strict=True):
            assert response is not None, "an admission needs an exchange"
            self._seat(worker, request, response, index, plan)
        return self._run(worker, plan)

    def _grow(
        self, worker: Worker, draft: Draft, response: CacheServiceLinkResponse, extend: int, plan: StepPlan
    ) -> None:
        blocks = np.frombuffer(response.results[extend].extend.block_ids, np.int32)
        # A sequence that ended while the exchange was on its way has been freed with its new block.
        alive = [i for i, (slot, generation) in enumerate(draft.growth) if worker.slots.generation[slot] == generation]
        slots = np.array([draft.growth[i][0] for i in alive], np.int32)
        plan.grow_slots, plan.grow_blocks = slots.tobytes(), blocks[alive].tobytes()
        for i in alive:
            worker.grow(*draft.growth[i])

    def _seat(
        self, worker: Worker, request: Request, response: CacheServiceLinkResponse, index: int, plan: StepPlan
    ) -> None:
        granted = admit_result(response, index)
        if granted is None or request.phase is Phase.ENDED:
            return  # the caller puts it back into the queue, or frees what it got
        slot = worker.slots.occupy(request, self.session_index(request), len(granted.block_table) // 4)
        request.phase, request.worker, request.slot = Phase.RUNNING, worker.id, slot
        if request.cached_tokens is None:
            request.cached_tokens = granted.num_cached_tokens
        worker.running[slot] = request
        worker.prefills[slot] = Prefill(slot, request.num_tokens, granted.num_cached_tokens)
        plan.new_sequences.append(
            NewSequence(
                slot=slot,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=granted.num_cached_tokens,
                block_table=granted.block_table,
                sampling=request.sampling,
                request_id=request.request_id,
            )
        )

    def _run(self, worker: Worker, plan: StepPlan) -> StepPlan | None:
        """Choose the rows and note them as in flight."""
        slots = worker.slots
        rows, generations = slots.decode_rows()
        chunks = self._chunks(worker, len(rows))
        if not (len(rows) or chunks):
            self._withdraw(worker, plan)
            return None
        plan.prefill_slots = np.array([chunk.slot for chunk in chunks], np.int32).tobytes()
        plan.prefill_tokens = np.array(
            [chunk.num_computed - worker.prefills[chunk.slot].num_planned for chunk in chunks], np.int32
        ).tobytes()
        sampled = len(rows) + sum(chunk.samples for chunk in chunks)
        worker.in_flight.append(StepInFlight(plan.step, worker.decode_step, rows, generations, tuple(chunks), sampled))
        if len(rows):
            self._advance_decodes(worker)
        for chunk in chunks:
            self._advance_prefill(worker, chunk)
        return plan

    def _chunks(self, worker: Worker, num_decodes: int) -> list[Chunk]:
        if not worker.prefills:
            return []
        prefills = list(worker.prefills.values())
        budget = self.policies.batch.prefill_budget(worker.registration.max_batched_tokens, num_decodes)
        sizes = self.policies.batch.chunks([prefill.remaining_tokens for prefill in prefills], budget)
        return [
            Chunk(p.slot, int(worker.slots.generation[p.slot]), p.num_planned + size, p.num_tokens)
            for p, size in zip(prefills, sizes, strict=True)
            if size
        ]

    def _advance_decodes(self, worker: Worker) -> None:
        step = worker.decode_step
        worker.decode_step += 1
        for slot, generation in worker.last_steps.due(step):
            if worker.slots.generation[slot] == generation:
                worker.finish_sending(slot)
        worker.last_steps.discard(step)
        worker.growth.discard(step)

    def _advance_prefill(self, worker: Worker, chunk: Chunk) -> None:
        worker.prefills[chunk.slot].num_planned = chunk.num_computed
        if not chunk.samples:
            return
        del worker.prefills[chunk.slot]
        limit = worker.running[chunk.slot].max_total_tokens
        if chunk.num_tokens + 1 < limit:
            worker.begin_decoding(chunk.slot, chunk.num_tokens + 1, limit)
        else:
            worker.finish_sending(chunk.slot)

    def _withdraw(self, worker: Worker, plan: StepPlan) -> None:
        """Everything the step was for has ended meanwhile: it never was."""
        worker.steps_sent -= 1
        worker.frees[:0] = np.frombuffer(plan.free_slots, np.int32).tolist()
        assert not plan.new_sequences, "a sequence that was seated has something to run"
