"""Retries the requests of a failed step, apart from all others (the rule is in suspects.py).

A worker retries one group of suspects at a time, in steps without other sequences. No other step is in flight
meanwhile. Each suspect computes its known tokens again and generates until it is past the point of the failure: at
least two tokens (the first from a prefill, the second from a decode), and at least one for each step that may have
failed. Then the suspect is cleared and runs with the others. Between two groups the worker runs a step with all other
sequences.

A suspect waits in the queue like any other request. While there is a waiting group that a worker can retry, the worker
admits no other request. As many suspects of the group get a slot as there is room for; the others wait for the next
turn. A held suspect (suspects.py) is not retried, and no request waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.faults.suspects import Absence, Suspects
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.policy.interfaces import BatchPolicy
from scheduler_svc.core.policy.step import CapacityPolicy, Step, Verdict
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request, RequestView
from scheduler_svc.core.workers.state import WorkerState

# The most time between two ticks that counts as a worker's absence. If more passes, this process itself was stopped.
MOST_BETWEEN_TICKS_S = 0.5
PROOF_TOKENS = 2  # that a suspect has to generate: the first comes from its prefill, the second from a decode


class _Retry(NamedTuple):
    request: Request
    cleared_at: int  # number of tokens at which the request is past the failure
    why: str  # the reason of its latest blame


@dataclass(slots=True)
class RetryGroups:
    """The groups of suspects that wait for a retry, and the group that each worker retries."""

    life: Lifecycle
    suspects: Suspects
    _retries: dict[int, _Retry] = field(default_factory=dict)  # of every suspect, by arrival index
    _at: dict[int, list[int]] = field(default_factory=dict)  # the group that a worker retries, by worker
    _resting: set[int] = field(default_factory=set)  # workers that run other sequences in their next step
    clock_s: float = 0.0  # does not count time in which this process did not run
    _ticked_s: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self._retries)

    def blame(
        self, requests: Sequence[Request], num_rows: int, num_steps: int, why: str, absence: Absence | None
    ) -> Request | None:
        """These requests were in steps that failed, and hold no slot any more. See Suspects.blame."""
        for request in requests:
            self._is_cleared(request)  # it may have got past an earlier failure before this step failed
        poisoned = self.suspects.blame([request.arrival_index for request in requests], num_rows, absence)
        for request in requests:
            request.is_suspect = request.arrival_index in self.suspects
            if request.is_suspect:
                cleared_at = request.num_tokens + max(PROOF_TOKENS, num_steps)
                self._retries[request.arrival_index] = _Retry(request, cleared_at, why)
                if request.arrival_index in self.suspects.held:
                    self.life.note(request, "held", "until it is known whether the workers that were lost come back")
            else:
                self._retries.pop(request.arrival_index, None)
        return next((request for request in requests if request.arrival_index == poisoned), None)

    def find_poisoned(self) -> list[tuple[Request, str]]:
        """Held requests that turn out to be poisoned, with the reason. Call it with each tick."""
        self.clock_s += min(self.life.now_s - self._ticked_s, MOST_BETWEEN_TICKS_S)
        self._ticked_s = self.life.now_s
        for one in list(self.suspects.held):
            self._is_cleared(self._retries[one].request)  # the request may have ended
        found = [self._retries.pop(poisoned) for poisoned in self.suspects.find_poisoned(self.clock_s)]
        return [(retry.request, retry.why) for retry in found]

    def worker_lost(self, worker: int, blamed: Collection[Request]) -> None:
        """Retry again what the lost worker was retrying, except requests that were blamed again: these wait already."""
        again = {request.arrival_index for request in blamed}
        group = self._at.pop(worker, [])
        self.suspects.requeue([one for one in group if one in self._retries and one not in again])
        self._resting.discard(worker)

    def has_group_for(self, worker: WorkerState) -> bool:
        """Whether there is a waiting group that the worker can retry. Then the worker admits no other request."""
        return any(self._suits(worker, group) for group in self.suspects.waiting())

    def members(self, worker: WorkerState) -> list[Request]:
        """The suspects that the worker's next step retries, alone. Empty if the step is an ordinary one."""
        if worker.id in self._resting:
            return []
        group = self._at.pop(worker.id, [])
        if not (left := self._left(worker, group)):
            if group:  # the group is done
                self._resting.add(worker.id)
                return []
            taken = self.suspects.take(lambda waiting: self._suits(worker, waiting))
            left = self._left(worker, taken)
        if left:
            self._at[worker.id] = [request.arrival_index for request in left]
        return left

    def pause(self, worker: WorkerState) -> None:
        """No suspect of the group could run: room or the cache's answer was missing. Other requests continue."""
        self.suspects.requeue(self._at.pop(worker.id, []))
        self._resting.add(worker.id)

    def others_had_their_turn(self, worker: WorkerState) -> None:
        self._resting.discard(worker.id)

    def _suits(self, worker: WorkerState, group: Sequence[int]) -> bool:
        requests = [self._retries[one].request for one in group]
        for request in requests:
            worker.want_grammar(request)
        return not worker.draining and all(worker.can_ever_hold(one) and worker.has_grammar(one) for one in requests)

    def _left(self, worker: WorkerState, group: Sequence[int]) -> list[Request]:
        """The members of a group that the worker still has to retry. A draining worker admits none."""
        requests = [self._retries[one].request for one in group if one in self._retries]
        left = [request for request in requests if not self._is_cleared(request)]
        if not worker.draining:
            return left
        self.suspects.requeue([request.arrival_index for request in left if request.phase is Phase.WAITING])
        return [request for request in left if request.phase is not Phase.WAITING]

    def _is_cleared(self, request: Request) -> bool:
        """Whether the request is no suspect any more: it has ended, or is past the point of the failure."""
        if not request.is_suspect:
            return True
        if request.phase not in (Phase.ENDED, Phase.PARKED):
            num_tokens = request.num_prompt_tokens + request.num_generated_tokens
            if num_tokens < self._retries[request.arrival_index].cleared_at:
                return False
            self.life.note(request, "cleared", "got past the point at which its step had failed")
        request.is_suspect = False
        self.suspects.clear(request.arrival_index)
        self._retries.pop(request.arrival_index, None)
        return True


class RetryCapacity(CapacityPolicy):
    """Admits every request that fits."""

    reserves_prompt = True

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        return Verdict.ADMIT


class RetryBatch(BatchPolicy):
    """Schedules the members, and nothing else."""

    shares_in_step = False

    def __init__(self, members: Collection[Request]) -> None:
        self._members = {request.arrival_index for request in members}

    def schedule(self, step: Step) -> None:
        for sequence in step.running:
            if sequence.request.arrival_index in self._members and step.budget_tokens:
                step.run(sequence, min(sequence.remaining_tokens, step.budget_tokens))
        for request in step.waiting():
            if not step.budget_tokens:
                return
            step.admit(request, min(step.uncached_tokens(request), step.budget_tokens))


def retry_candidates(members: Sequence[Request], worker: WorkerState) -> Iterator[Request]:
    """The members that could get a slot on the worker now."""
    for request in members:
        matched = request.matches is not None or request.held.swapped_on == worker.id
        if request.phase is not Phase.WAITING or not matched:
            continue
        if worker.has_grammar(request):
            yield request
        else:
            worker.want_grammar(request)
