"""Stage one of a step: the policies decide what one worker's next step runs, and which sequences are preempted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.policy.step_view import Waiting
from scheduler_svc.core.policy.views import Paused, Running
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.steps import OutOfBlocks

# If a waiting request was rejected for one of these reasons, the preemption of another sequence can help.
PREEMPTION_HELPS = ("slots", "capacity", "blocks")
# Pauses of one worker between two tokens. Without a limit, a policy could pause every sequence it admits, for ever.
MAX_PAUSES = 64


@dataclass(frozen=True, slots=True)
class Decider:
    """Calls the policies for one step of one worker."""

    life: Lifecycle

    def decide(self, worker: WorkerState, policies: Policies, waiting: Waiting, now_s: float) -> Step | None:
        """Schedule the online requests of the next step of `worker`; it may be empty. The policies see the worker as if
        it ran no offline request.

        Returns None if a sequence was preempted: its blocks come back with the next exchange, and then the step is
        scheduled again. Raises whatever a policy raises.
        """
        step = self.apply_policies(worker, policies, waiting, now_s, offline=False)
        if step is not None and (torn := self._torn_samples(worker, policies, step)):
            # Admit only requests before the first group that would resume in part: later ones take the room it needs.
            before = partial(takewhile, lambda request: id(request.family.samples) not in torn)
            step = self.apply_policies(worker, policies, lambda: before(waiting()), now_s, offline=False)
        if step is None or self._preempt_for_waiting(worker, policies, step):
            return None
        if worker.batch.offline and self._yield(worker, step):
            return None
        self._expect_progress(worker, step)
        return step

    def decide_retry(
        self, worker: WorkerState, policies: Policies, waiting: Waiting, now_s: float, offline: bool
    ) -> Step | None:
        """Schedule a step that retries suspects of one class. Returns None as decide()."""
        step = self.apply_policies(worker, policies, waiting, now_s, offline)
        if step is not None and worker.batch.offline and not offline and self._yield(worker, step):
            return None
        return step

    def apply_policies(
        self,
        worker: WorkerState,
        policies: Policies,
        waiting: Waiting,
        now_s: float,
        offline: bool,
        beside: Step | None = None,
    ) -> Step | None:
        """As decide(), but without a check for progress; `for_waiting` is not asked, and no offline sequence yields.
        `offline`: the class that the policies see. `beside`: the online part of the step; offline requests get what it
        leaves."""
        shares = policies.batch.shares_in_step
        over_budget = partial(self.life.budgets.exceeded, worker)
        step = Step(worker, waiting, now_s, over_budget, policies.order, shares, policies.capacity, _offline=offline)
        if beside is None:
            worker.allocating_tokens = 0
            if worker.batch.offline and not offline:
                step._lend(self._offline_blocks(worker))
        else:
            step._follow(beside, self.life.config.max_offline_tokens)
        try:
            policies.capacity.begin(step)
            policies.batch.schedule(step)
            step._close()
        except OutOfBlocks as lack:
            self._make_room(worker, policies, step, lack.shortfall_blocks)
            return None
        except Paused as paused:
            worker.num_pauses += 1
            if worker.num_pauses > MAX_PAUSES:
                times = f"{worker.num_pauses} times without a token in between"
                raise PolicyError(f"capacity: running sequences were paused {times}") from None
            for unit in self._units(worker, policies, step, step._own_all(paused.victims)):
                self._preempt_unit(worker, unit, policies)
            return None
        return step

    def _offline_blocks(self, worker: WorkerState) -> int:
        """Blocks that online requests can take from offline ones. Exact if waiting online requests may be admitted,
        because the policies promise them blocks for later. Otherwise an upper bound: if _yield() frees too few, the
        step is scheduled again with the blocks that are free then."""
        return worker.only_offline_blocks() if len(self.life.queue.online) else worker.most_offline_blocks

    def _yield(self, worker: WorkerState, step: Step) -> bool:
        """Preempt offline sequences if the online requests of the step take slots, blocks or adapters from them, the
        last admitted first. Returns whether it preempts any: then the step is scheduled again, when the cache has freed
        their blocks."""
        batch, loras = worker.batch, step._lacking_adapters()
        slots = len(batch.offline) - step._num_free_slots
        blocks = step._lent_blocks - step._available_blocks
        if slots <= 0 and blocks <= 0 and not loras:
            return False
        # A sequence with its last token in flight comes last: it has to compute that token again.
        last_first = [slot for slot in reversed(batch.running) if slot in batch.offline]
        for slot in sorted(last_first, key=batch.finishing.__contains__):
            request = batch.running[slot]
            if slots <= 0 and blocks <= 0 and request.metadata.lora not in loras:
                continue
            slots, blocks = slots - 1, blocks - int(batch.slots.capacity[slot]) // worker.block_size
            self.life.preempt(request, "arrival", "recompute", "preempted for online requests")
        worker.yielded, worker.knows_cache = True, False
        return True

    @staticmethod
    def _torn_samples(worker: WorkerState, policies: Policies, step: Step) -> set[int]:
        """Groups of samples of which the step resumes some swapped-out members, but not all. A group is named by id()
        of its list. Only in mode "auto". Each swapped-out sample has its own copy of the blocks that the samples
        shared, so a group may need more blocks than the pool has. Therefore a worker on which nothing runs may resume a
        part of a group."""
        runs = worker.batch.running or worker.in_flight
        if not (worker.host.swapped and policies.preemption.mode == "auto" and runs):
            return set()
        back = {admission.request.arrival_index for admission in step._decision().admissions}
        samples = [request for request in worker.host.swapped.values() if request.family.samples]
        resumed = {id(request.family.samples) for request in samples if request.arrival_index in back}
        return resumed & {id(request.family.samples) for request in samples if request.arrival_index not in back}

    @staticmethod
    def _expect_progress(worker: WorkerState, step: Step) -> None:
        """Raise PolicyError if the worker is idle, a request could run, and the policies do not say why it waits."""
        if not step.is_empty or worker.in_flight or step.preempted:
            return
        if step.running or not (step.rejected or next(step.waiting(), None) is None):
            raise PolicyError("batch: the step is empty, though a request could run, and no reason is given")

    def _make_room(self, worker: WorkerState, policies: Policies, step: Step, shortfall_blocks: int) -> None:
        """Preempt until the shortfall is covered, by estimate: other sequences may still use a victim's shared blocks.

        A sequence that runs alone can lack room for two reasons: it holds some blocks twice (its own, and equal ones
        that were stored before), or pins hold blocks. It is preempted itself, and the cache is asked to give up the
        pins. When it comes back, it shares the stored blocks and fits.
        """
        if worker.parked:
            return  # parked beams are freed first: a fork without its parent computes a few tokens again
        victims = step._own_all(policies.preemption.victims(step))
        if not victims and len(step.running) > 1:
            raise PolicyError("preemption: the policy names no victim")
        if len(victims) >= len(step.running):
            victims.pop()
        if not victims and not worker.in_flight:
            victims = list(step.running)
        for unit in self._units(worker, policies, step, victims):
            for victim in unit:
                # the blocks that the victim needed for this step are not needed either
                shortfall_blocks -= victim.num_blocks + step._growth_of(victim)
            self._preempt_unit(worker, unit, policies)
            if shortfall_blocks <= 0:
                break

    @staticmethod
    def _units(worker: WorkerState, policies: Policies, step: Step, victims: list[Running]) -> Iterator[list[Running]]:
        """The victims one by one. In mode "auto", each victim takes all running samples of its prompt along (a sequence
        group of vLLM V0), unless nothing would be left to run."""
        left = {
            sequence.slot: (sequence, worker.batch.running[sequence.slot].family.samples) for sequence in step.running
        }
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
        """Preempt sequences for a waiting request, if the policy names any. The next step runs without them and does
        not preempt for a waiting request again, so that there is progress in between."""
        refused = any(reason in PREEMPTION_HELPS for _, reason, _ in step._rejected)
        if not (refused and worker.batch.num_further) or step.num_admissions or step.preempted:
            return False
        victims = step._own_all(policies.preemption.for_waiting(step))
        if len(victims) >= len(step.running):
            victims = victims[:-1]
        for victim in victims:
            requeue = policies.preemption.requeue
            self._preempt(worker, victim, requeue, "recompute", "preempted for a waiting request")
        return bool(victims)

    def _preempt_unit(self, worker: WorkerState, victims: list[Running], policies: Policies) -> None:
        requeue, mode = policies.preemption.requeue, policies.preemption.mode
        for victim in victims:
            self._preempt(worker, victim, requeue, mode, "preempted to free blocks for running sequences")

    def _preempt(self, worker: WorkerState, victim: Running, requeue: str, mode: str, why: str) -> None:
        request = worker.batch.running[victim.slot]
        if request.metadata.offline:  # as in _yield(): the policies in force decide only about online ones
            requeue, mode, worker.yielded = "arrival", "recompute", True
        else:
            worker.preempted.append(request)
        self.life.preempt(request, requeue, mode, why)
        worker.knows_cache = False
