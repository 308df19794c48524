"""Stage three of a step: the plan for its worker, with the blocks that the cache granted in the exchange."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.v1.cache_pb2 import AdmitResult, CacheServiceLinkResponse
from paceline.v1.worker_pb2 import StepPlan, WorkerServiceLinkResponse
from scheduler_svc.core.arrays import packed
from scheduler_svc.core.cache.link import CacheLink, admit_result
from scheduler_svc.core.cache.namespaces import CacheNamespaces
from scheduler_svc.core.cache.swapping import Swaps
from scheduler_svc.core.output.prefix_use import PrefixUse
from scheduler_svc.core.output.sessions import Publisher
from scheduler_svc.core.output.timeline import RequestTimeline
from scheduler_svc.core.requests.phases import Event, Phase
from scheduler_svc.core.requests.request import TOKEN_BYTES
from scheduler_svc.core.types import SchedulerCounters
from scheduler_svc.core.workers.block_boundaries import NONE
from scheduler_svc.core.workers.state import WorkerState, new_plan
from scheduler_svc.core.workers.steps import Decision, DraftRow, PendingStep, PlannedAdmission, StepInFlight


@dataclass(frozen=True, slots=True)
class Emitter:
    """Makes the plan of a step from the blocks that the cache granted."""

    cache: CacheLink
    swaps: Swaps
    publisher: Publisher
    namespaces: CacheNamespaces
    counters: SchedulerCounters
    timeline: RequestTimeline

    def emit(
        self, worker: WorkerState, pending_step: PendingStep, response: CacheServiceLinkResponse | None, now_s: float
    ) -> WorkerServiceLinkResponse | None:
        """Build the plan, with the blocks that the cache granted. None if nothing is left to run."""
        decision = pending_step.decision
        message = new_plan(worker)
        plan = message.plan
        worker.allocating_tokens = 0
        if len(decision.growth):
            assert response is not None, "growth needs an exchange"
            self._grow(worker, pending_step, response, plan)
        self._choose_decodes(worker, decision.decodes, plan)
        drafts = self._choose_drafts(worker, decision, plan) if decision.drafts or decision.ended_drafts else []
        generation = worker.batch.slots.generation
        lost = decision.shares and bool(decision.admissions) and self._has_lost(worker, decision)
        sizes = {slot: size for slot, gen, size in decision.chunks if generation[slot] == gen}
        for admission, index in zip(decision.admissions, pending_step.admits, strict=True):
            assert response is not None, "an admission needs an exchange"
            if lost and (granted := admit_result(response, index)) is not None and granted.shares_planned:
                continue  # the caller requeues the request
            self._fill_slot(worker, admission, response, index, plan, sizes)
        return message if self._run(worker, plan, sizes, drafts, pending_step.planned_s, now_s) else None

    @staticmethod
    def _has_lost(worker: WorkerState, decision: Decision) -> bool:
        """Whether a sequence that the step computes prompt tokens for has ended since the step was scheduled."""
        generation = worker.batch.slots.generation
        ended = any(admission.request.phase is Phase.ENDED for admission in decision.admissions)
        return ended or any(generation[slot] != gen for slot, gen, _ in decision.chunks)

    def _grow(
        self, worker: WorkerState, pending_step: PendingStep, response: CacheServiceLinkResponse, plan: StepPlan
    ) -> None:
        assert pending_step.extend is not None
        slots, blocks = pending_step.decision.growth, response.results[pending_step.extend].extend.block_ids
        if worker.batch.slots.num_releases != pending_step.num_releases:
            # A sequence that ended during the exchange was freed together with its new block.
            alive = worker.batch.slots.generation[slots] == pending_step.decision.growth_generations
            slots, blocks = slots[alive], np.frombuffer(blocks, np.int32)[alive].tobytes()
        packed_slots = slots.astype(np.int32).tobytes()
        plan.grow_slots, plan.grow_blocks = packed_slots, blocks
        worker.batch.grow(slots)
        worker.batch.slots.note_growth(packed_slots, blocks)

    def _choose_decodes(self, worker: WorkerState, chosen: list[int] | None, plan: StepPlan) -> None:
        """Pause the decoding sequences that were not chosen. A step without decodes pauses and resumes none."""
        if chosen is None and not worker.batch.paused:
            return
        if chosen == []:
            plan.skip_decodes = worker.batch.num_decoding > 0
            return
        paused, resumed = worker.batch.choose_decodes(chosen)
        if paused or resumed:
            plan.hold_slots = packed(paused)
            plan.resume_slots = packed(resumed)

    def _choose_drafts(self, worker: WorkerState, decision: Decision, plan: StepPlan) -> list[DraftRow]:
        """The draft rows of sequences that still run. Sequences that stop drafting decode in this step."""
        batch, generation = worker.batch, worker.batch.slots.generation
        ended = [slot for slot, gen in decision.ended_drafts if generation[slot] == gen]
        plan.resume_slots += packed(slot for slot in ended if batch.end_drafting(slot))
        return [row for row in decision.drafts if generation[row.slot] == row.generation]

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
            return  # the caller requeues a refused request; an ended one has freed its sequence already
        num_cached_tokens, block_table = granted.num_cached_tokens, granted.block_table
        slot = worker.batch.start(request, self.publisher.index_of(request), block_table, num_cached_tokens)
        request.advance(Event.GRANT)
        if request.history.cached_tokens is None:
            reported = self.namespaces.reported_tokens(num_cached_tokens, worker.block_size)
            request.history.cached_tokens = reported
            request.history.num_cached_host_tokens = max(reported - _device_tokens(granted, worker.block_size), 0)
            if worker.prefix_caching:
                whole = request.needs_whole_prompt
                use = PrefixUse.of(granted, request.num_tokens, reported, worker.block_size, needs_whole_prompt=whole)
                self.timeline.found(request, use)
            if worker.prefix_caching and not request.needs_whole_prompt and request.family.parent is None:
                self.counters.prefix_query_tokens += request.num_tokens
                self.counters.prefix_hit_tokens += reported
        # The cache may hold more of the prompt now than when the step was scheduled.
        sizes[slot] = min(admission.num_tokens, request.num_tokens - num_cached_tokens)
        if request.held.swapped_on:
            swap = response.results[index].swap_in
            plan.swap_in_from += swap.host_blocks
            plan.swap_in_to += swap.device_blocks
            self.swaps.resumed(request)
        elif granted.host_blocks:
            plan.swap_in_from += granted.host_blocks
            plan.swap_in_to += granted.device_blocks
        if copy_from := granted.copy_from:
            plan.copy_from += copy_from.to_bytes(4, "little")
            at = 4 * (num_cached_tokens // worker.block_size)  # byte offset of the block with the first uncached token
            plan.copy_to += block_table[at : at + 4]
        # filled in place: passing a message copies it, which costs more than the rest of this function
        new = plan.new_sequences.add()
        new.slot, new.token_ids, new.block_table = slot, request.token_ids, block_table
        new.num_prompt_tokens, new.num_cached_tokens = request.num_prompt_tokens, num_cached_tokens
        new.sampling.CopyFrom(request.sampling)
        new.request_id, new.cache_salt = request.request_id, request.metadata.cache_salt

    def _run(
        self,
        worker: WorkerState,
        plan: StepPlan,
        sizes: dict[int, int],
        drafts: list[DraftRow],
        planned_s: float,
        now_s: float,
    ) -> bool:
        """Record the rows as in flight. Returns whether there are any."""
        slots = worker.batch.slots
        rows = slots.rows_of(NONE) if plan.skip_decodes else slots.decode_rows()
        chunks = [worker.batch.chunk(slot, size) for slot, size in sizes.items()]
        if not (len(rows) or chunks or drafts):
            self._undo(worker, plan)
            return False
        if worker.batch.drafting:
            plan.hold_slots += packed(worker.batch.take_holds())
        if chunks:
            plan.prefill_slots = packed(chunk.slot for chunk in chunks)
            plan.prefill_tokens = packed(sizes.values())
        new_tokens = sum(sizes.values())
        context_tokens = rows.base_tokens + len(rows) * worker.batch.decode_step
        if drafts:
            context_tokens += sum(row.num_tokens for row in drafts)
            plan.draft_slots = packed(row.slot for row in drafts)
            plan.draft_counts = packed(len(row.draft_tokens) for row in drafts)
            plan.draft_tokens = packed(token for row in drafts for token in row.draft_tokens)
        worker.host.add_copies(plan)
        sampled = 0 if worker.pools else len(rows) + sum(chunk.samples for chunk in chunks)
        step = StepInFlight(
            step=plan.step,
            rows=rows,
            decode_step=worker.batch.decode_step,
            num_releases=slots.num_releases,
            chunks=tuple(chunks),
            num_sampled=sampled,
            new_tokens=new_tokens,
            context_tokens=context_tokens,
            planned_s=planned_s,
            sent_s=now_s,
            drafts=drafts,
        )
        worker.in_flight.append(step)
        self.counters.step_tokens.observe(step.new_tokens + sampled + len(drafts) + step.num_draft_tokens)
        for row in drafts:
            worker.batch.advance_draft(row.slot)
        if len(rows):
            worker.batch.advance_decodes()
        for chunk in chunks:
            request = worker.batch.running[chunk.slot]
            if request.trace is not None:
                request.trace.sent(worker.id, plan.step, sizes[chunk.slot], samples=chunk.samples, now_s=now_s)
            # The cache learns of it at once: a request that is admitted next runs later, when the blocks are written.
            self.cache.add_commit(request.held.sequence, b"", chunk.num_computed)
            worker.batch.advance_prefill(chunk)
        return True

    def _undo(self, worker: WorkerState, plan: StepPlan) -> None:
        """Undo the plan: every sequence in it has ended since."""
        worker.steps_sent -= 1
        worker.batch.frees[:0] = np.frombuffer(plan.free_slots, np.int32).tolist()
        worker.batch.resume(np.frombuffer(plan.hold_slots, np.int32).tolist())
        assert not plan.new_sequences, "a new sequence has something to run"


def _device_tokens(granted: AdmitResult, block_size: int) -> int:
    """The cached tokens that were in device memory. In the prompt they come first, then tokens from host memory, and
    then perhaps the beginning of one more device block, which is copied. Its tokens count, too."""
    num_cached, num_host_blocks = granted.num_cached_tokens, len(granted.host_blocks) // TOKEN_BYTES
    if granted.copy_from:
        return num_cached - num_host_blocks * block_size
    return min(num_cached, (-(-num_cached // block_size) - num_host_blocks) * block_size)
