"""Mistakes to plant in the real cores: each must make the simulation fail at a known seed.

docs/reliability-tests.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import simulator.network.election
from cache_svc.core.cache import CacheCore
from cache_svc.core.memory.eviction import EvictionQueue
from cache_svc.core.memory.memory import Memory
from cache_svc.core.operations import Operations
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import BlockResidency, PrefixNode
from paceline.v1.inference_pb2 import Submission
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.lease import LeaseClock
from scheduler_svc.core.lifecycle.holdings import Holdings
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.lifecycle.recovery import Recovery
from scheduler_svc.core.output.sessions import Session
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.step.emit import Emitter
from scheduler_svc.core.workers.batch import Batch
from scheduler_svc.core.workers.grammars import WorkerGrammars
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.swap_space import SwapSpace
from services.gateway.engine.session_core import SessionCore
from simulator.network.parties import CacheParty, WorkerParty

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    mistake: str
    plant: Callable[[Patch], None]
    caught_by: int  # a seed that fails only with the mistake

    @property
    def name(self) -> str:
        return self.plant.__name__


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a method and does nothing."""


def freed_too_early(patch: Patch) -> None:
    leave_path = Memory.leave_path

    def mistaken(self: Memory, node: PrefixNode) -> None:
        at = node
        while at.parent is not None:
            at.residencies[self.index].users, at = 1, at.parent
        leave_path(self, node)

    patch.setattr(Memory, "leave_path", mistaken)


def user_not_counted(patch: Patch) -> None:
    use = Memory.use

    def mistaken(self: Memory, residency: BlockResidency, priority: float = 0.0) -> None:
        shared = bool(residency.users)
        use(self, residency, priority)
        residency.users -= shared

    patch.setattr(Memory, "use", mistaken)


def used_block_evicted(patch: Patch) -> None:
    patch.setattr(EvictionQueue, "use", nothing)


def fork_without_copy(patch: Patch) -> None:
    fork = WorkerBlocks.fork
    patch.setattr(WorkerBlocks, "fork", lambda self, *args: (fork(self, *args)[0], 0))


def old_epoch_kept(patch: Patch) -> None:
    def mistaken(self: CacheCore) -> None:
        if not hasattr(self, "last_exchange"):
            Operations.reset(self)
        self.last_exchange = self.epoch = 0

    patch.setattr(CacheCore, "reset", mistaken)


def _plan_without(patch: Patch, *fields: str) -> None:
    fill_slot = Emitter._fill_slot

    def mistaken(self: Emitter, *args: Any) -> None:
        fill_slot(self, *args)
        for field in fields:
            args[4].ClearField(field)

    patch.setattr(Emitter, "_fill_slot", mistaken)


def copy_lost(patch: Patch) -> None:
    _plan_without(patch, "copy_from", "copy_to")


def swap_in_lost(patch: Patch) -> None:
    _plan_without(patch, "swap_in_from", "swap_in_to")


def demotion_lost(patch: Patch) -> None:
    patch.setattr(SwapSpace, "add_demotions", nothing)


def slot_not_freed(patch: Patch) -> None:
    vacate = Batch.vacate

    def mistaken(self: Batch, slot: int) -> Any:
        request = vacate(self, slot)
        self.frees.remove(slot)
        return request

    patch.setattr(Batch, "vacate", mistaken)


def tokens_forgotten(patch: Patch) -> None:
    patch.setattr(Holdings, "flush_output", nothing)


def sequence_leaked(patch: Patch) -> None:
    patch.setattr(CacheLink, "forget_sequence", nothing)


def lost_wake_up(patch: Patch) -> None:
    patch.setattr(Lifecycle, "unanswered", nothing)


def dropped_with_worker(patch: Patch) -> None:
    evacuate = Lifecycle.evacuate

    def mistaken(self: Lifecycle, *args: Any) -> list[Request]:
        evacuate(self, *args)
        return []

    patch.setattr(Lifecycle, "evacuate", mistaken)


def restore_entry_too_long(patch: Patch) -> None:
    fill = Recovery._fill

    def mistaken(self: Recovery, claim: Any, request: Any) -> None:
        fill(self, claim, request)
        claim.num_computed_tokens = min(claim.num_computed_tokens + 1, request.num_tokens)

    patch.setattr(Recovery, "_fill", mistaken)


def never_released(patch: Patch) -> None:
    patch.setattr(SchedulerCore, "_release_drained", nothing)


def token_twice(patch: Patch) -> None:
    submissions = SessionCore._submissions

    def mistaken(self: SessionCore) -> Iterator[Submission]:
        for submission in submissions(self):
            submission.output_token_ids = submission.output_token_ids[:-4]
            yield submission

    patch.setattr(SessionCore, "_submissions", mistaken)


def brought_tokens_kept_back(patch: Patch) -> None:
    submissions = SessionCore._submissions

    def mistaken(self: SessionCore) -> Iterator[Submission]:
        for submission in submissions(self):
            if not submission.accepted_before:
                submission.ClearField("output_token_ids")
            yield submission

    patch.setattr(SessionCore, "_submissions", mistaken)


def not_resubmitted(patch: Patch) -> None:
    connect = SessionCore.connect

    def mistaken(self: SessionCore) -> Any:
        unsent = self._unsent
        ended = connect(self)
        self._unsent = unsent
        return ended

    patch.setattr(SessionCore, "connect", mistaken)


def credit_lost(patch: Patch) -> None:
    message = SchedulerCore.session_message

    def mistaken(self: SchedulerCore, session_id: str, request: Any, now_s: float) -> None:
        request.responses_read = min(request.responses_read, 1)
        message(self, session_id, request, now_s)

    patch.setattr(SchedulerCore, "session_message", mistaken)


def slow_reader_misses(patch: Patch) -> None:
    next_message = Session.next_message

    def mistaken(self: Session) -> Any:
        if self.sent - self.read >= self.window:
            self._handles.clear()
            self._tokens.clear()
        return next_message(self)

    patch.setattr(Session, "next_message", mistaken)


def beam_not_unparked(patch: Patch) -> None:
    patch.setattr(Lifecycle, "unpark", nothing)


def planned_counts_as_written(patch: Patch) -> None:
    plan = WorkerBlocks.plan

    def mistaken(self: WorkerBlocks, sequence: Any, num_computed_tokens: int) -> None:
        plan(self, sequence, num_computed_tokens)
        self.written(sequence)

    patch.setattr(WorkerBlocks, "plan", mistaken)


def matches_outlive_cache(patch: Patch) -> None:
    patch.setattr(Holdings, "forget_matches", nothing)


def pending_step_lost_with_worker(patch: Patch) -> None:
    patch.setattr(WorkerState, "drop_pending_step", lambda self: [])


def copied_block_granted(patch: Patch) -> None:
    patch.setattr(Memory, "_withhold", nothing)


def _forget_epoch(patch: Patch, party: type, method: str, fence: str) -> None:
    """Resets the fence before each message, as if there had been no leader yet."""
    check = getattr(party, method)

    def mistaken(self: Any, *args: Any) -> Any:
        getattr(self, fence).epoch = 0
        return check(self, *args)

    patch.setattr(party, method, mistaken)


def worker_forgets_epoch(patch: Patch) -> None:
    _forget_epoch(patch, WorkerParty, "received", "fence")


def gateway_forgets_epoch(patch: Patch) -> None:
    _forget_epoch(patch, SessionCore, "receive", "_fence")


def cache_forgets_epoch(patch: Patch) -> None:
    _forget_epoch(patch, CacheParty, "accepted", "fence")


def lease_end_unnoticed(patch: Patch) -> None:
    patch.setattr(LeaseClock, "holds", lambda self, _: self.ends_s > 0)


def epoch_not_larger(patch: Patch) -> None:
    patch.setattr(simulator.network.election, "next_epoch", lambda last, wall_ms: last or wall_ms)


def grammar_not_awaited(patch: Patch) -> None:
    patch.setattr(WorkerGrammars, "has", lambda self, grammar: grammar in self._ids)


MUTANTS = [
    Mutant("a block is freed when the first of its users leaves", freed_too_early, 0),
    Mutant("a second user of a block is not counted", user_not_counted, 0),
    Mutant("a block that is used again can still be evicted", used_block_evicted, 0),
    Mutant("a fork does not copy the last block", fork_without_copy, 0),
    Mutant("the cache keeps the state of the previous link", old_epoch_kept, 1),
    Mutant("a copy-on-write never reaches the worker", copy_lost, 0),
    Mutant("a swap-in never reaches the worker", swap_in_lost, 17),
    Mutant("an eviction to host memory never reaches the worker", demotion_lost, 10),
    Mutant("a worker is not told that a slot is free", slot_not_freed, 0),
    Mutant("a preempted request forgets its generated tokens", tokens_forgotten, 3),
    Mutant("the cache is not told that a request has ended", sequence_leaked, 0),
    Mutant("the requests that wait for the cache are not woken when the cache dies", lost_wake_up, 112),
    Mutant("the requests of a lost worker are not requeued", dropped_with_worker, 19),
    Mutant("a restore entry has one computed token too many", restore_entry_too_long, 49),
    Mutant("a draining worker is never released", never_released, 2),
    Mutant("a gateway resubmits without the last token that it has", token_twice, 0),
    Mutant("a gateway does not pass on the tokens that a client has brought", brought_tokens_kept_back, 0),
    Mutant("a gateway does not resubmit its live requests", not_resubmitted, 12),
    Mutant("a session's credit is not given back", credit_lost, 2),
    Mutant("tokens for which a reader has no credit are dropped", slow_reader_misses, 2),
    Mutant("a beam without forks keeps its blocks", beam_not_unparked, 29),
    Mutant("the blocks of a step count as written before the step is sent", planned_counts_as_written, 0),
    Mutant("a waiting request keeps its match when the cache is lost", matches_outlive_cache, 5),
    Mutant("a step that waits for the cache is lost with its worker", pending_step_lost_with_worker, 76),
    Mutant("a block that is to be copied is granted in the same exchange", copied_block_granted, 2),
    Mutant("a request is bound before its grammar is prepared", grammar_not_awaited, 1000),
    Mutant("a worker does not check the leader's epoch", worker_forgets_epoch, 231),
    Mutant("a gateway does not check the leader's epoch", gateway_forgets_epoch, 231),
    Mutant("the cache does not check the leader's epoch", cache_forgets_epoch, 21),
    Mutant("a leader does not notice that its lease is over", lease_end_unnoticed, 9),
    Mutant("a leader takes over with the previous leader's epoch", epoch_not_larger, 3),
]
