"""Speculative decoding: which sequences draft, and their draft rows.

A policy schedules a drafting sequence like any other decoding one, and pays one token for it. Its decode row is
replaced by a draft row. Draft tokens use only the token budget and the blocks that the rest of the step leaves. While
tokens of the sequence are in flight, it has no row in the step at all.

    decodes -> (its latest tokens were those that the lookup proposes) -> drafts -> (nothing proposed, too many rows, no
    room, wrong drafts, or an online request beside this offline one) -> decodes
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.drafts.drafter import Drafter, may_draft
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.steps import Decision, DraftRow, StepInFlight


@dataclass(frozen=True, slots=True)
class Drafting:
    """Starts and stops drafts, and makes draft rows, on workers that verify them."""

    life: Lifecycle

    def observe(self, worker: WorkerState, step: StepInFlight) -> None:
        """A step's tokens have come. Compare them with what the drafters expect."""
        batch = worker.batch
        if len(batch.running) > self.life.config.speculative_max_rows:
            return
        for slot in step.rows.slots.tolist():
            if batch.slots.decoding[slot] or slot in batch.drafting:
                self._see(worker, slot)

    def _see(self, worker: WorkerState, slot: int) -> Drafter | None:
        """Bring the slot's drafter up to date. None if the request allows no drafts."""
        batch, config = worker.batch, self.life.config
        request = batch.running[slot]
        if slot not in batch.drafters:
            drafter = Drafter(config.speculative_ngram_max, config.speculative_ngram_min)
            batch.drafters[slot] = drafter if may_draft(request) else None
        if (known := batch.drafters[slot]) is not None:
            self.life.holdings.flush_output(worker, slot)
            known.see(request.tokens_from(known.num_tokens))
        return known

    def verified(self, worker: WorkerState, row: DraftRow, num_sampled: int, num_kept: int) -> None:
        """The result of a draft row has come. `num_kept`: how many of the sampled tokens the request keeps. Tokens
        after one that ends the request are dropped."""
        num_accepted, counters = min(num_sampled - 1, num_kept), self.life.counters
        worker.batch.drafted(row.slot, num_sampled)
        counters.num_drafts += 1
        counters.num_draft_tokens += len(row.draft_tokens)
        counters.num_accepted_tokens += num_accepted
        if (drafter := worker.batch.drafters[row.slot]) is not None:
            drafter.verified(num_accepted)

    def must_ask(self, worker: WorkerState, cache: CacheLink) -> bool:
        """Whether drafts of the next step may take blocks, and the cache has not answered yet."""
        batch, most = worker.batch, self.life.config.speculative_tokens
        if not batch.drafting or cache.idle:
            return False
        slots = batch.ready_drafting()
        wanted = (min(batch.drafting[slot] + most, int(batch.slots.max_total[slot]) - 1) for slot in slots)
        return any(batch.slots.capacity[slot] < tokens for slot, tokens in zip(slots, wanted, strict=True))

    def add(self, worker: WorkerState, step: Step, decision: Decision, cache: CacheLink) -> Decision | None:
        """Add draft rows to what the policies have decided. None if the step would have no row, because all its
        sequences draft and wait for their tokens in flight."""
        batch = worker.batch
        num_rows = len(batch.running) - len(batch.finishing) + len(decision.admissions)
        few = num_rows <= self.life.config.speculative_max_rows
        chosen: Container[int] = batch.running if decision.decodes is None else decision.decodes
        # Offline requests draft only while no online request runs, because beside online requests the offline token
        # budget is small.
        admits_online = any(not admission.request.metadata.offline for admission in decision.admissions)
        barred = batch.offline if admits_online or len(batch.running) > len(batch.offline) else set[int]()
        if few:
            self._start(worker, chosen, barred)
        scheduled = [slot for slot in batch.drafting if slot in chosen]
        if not scheduled:
            return decision
        ready = [slot for slot in batch.ready_drafting() if slot in chosen]
        decision = _without_growth(decision, [slot for slot in scheduled if slot not in ready])
        num_decodes = batch.num_decoding if decision.decodes is None else len(decision.decodes)
        left_tokens = worker.max_batched_tokens - num_decodes
        left_tokens -= sum(tokens for _, _, tokens in decision.chunks)
        left_tokens -= sum(admission.num_tokens for admission in decision.admissions)
        # Drafts leave one block free for each running sequence, because the sequence may need a block in the next step.
        left_blocks = max(0, step._left_blocks - len(batch.running)) if cache.idle else 0
        generation = batch.slots.generation
        drafts, ended, growth = list[DraftRow](), list[tuple[int, int]](), list[int]()
        for slot in ready:
            num_tokens, drafter = batch.drafting[slot], self._see(worker, slot)
            assert drafter is not None, "only slots with a drafter draft"
            num_blocks = int(batch.slots.capacity[slot]) // worker.block_size
            num_blocks += int(np.count_nonzero(decision.growth == slot))
            room = (num_blocks + left_blocks) * worker.block_size
            most = min(room, num_tokens + left_tokens, int(batch.slots.max_total[slot]) - 1) - num_tokens
            count = min(most, self.life.config.speculative_tokens)
            proposed = drafter.propose(count) if few and count > 0 and slot not in barred else []
            if not proposed:
                drafter.stop()
                ended.append((slot, int(generation[slot])))
                continue
            drafts.append(DraftRow(slot, int(generation[slot]), num_tokens, proposed))
            missing = max(0, worker.blocks_for(num_tokens + count) - num_blocks)
            growth += [slot] * missing
            left_blocks -= missing
            left_tokens -= count
        others = num_decodes > len(scheduled) or decision.chunks or decision.admissions
        if not (drafts or ended or others):
            return None
        decision = decision._replace(drafts=drafts, ended_drafts=ended)
        if not growth:
            return decision
        slots = np.concatenate((decision.growth, np.array(growth, np.intp)))
        return decision._replace(growth=slots, growth_generations=generation[slots])

    def _start(self, worker: WorkerState, chosen: Container[int], barred: Container[int]) -> None:
        """Begin to draft where it pays, in slots that decode in this step, except the barred ones."""
        batch = worker.batch
        for slot, drafter in batch.drafters.items():
            if (
                drafter is None
                or not drafter.pays
                or not batch.slots.decoding[slot]
                or slot not in chosen
                or slot in barred
            ):
                continue
            request = batch.running[slot]
            # With one token to go there is nothing to draft.
            if request.is_suspect or batch.num_tokens(slot) + 1 >= batch.slots.max_total[slot]:
                continue
            batch.begin_drafting(slot)
            if not drafter.was_used:
                drafter.was_used = True
                self.life.note(request, "drafts", "its text repeats itself: its next tokens are guessed and verified")


def _without_growth(decision: Decision, slots: list[int]) -> Decision:
    """The decision without blocks for these slots, which have no row in the step. While the cache answers, the requests
    of all rows of the step may end. Then the scheduler sends no plan, and the worker would never learn of blocks for
    slots without a row."""
    others = ~np.isin(decision.growth, slots)
    if others.all():
        return decision
    return decision._replace(growth=decision.growth[others], growth_generations=decision.growth_generations[others])
