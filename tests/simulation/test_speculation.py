"""Speculative decoding under seeded interleavings and faults: every request gets the tokens of an undisturbed run.

The toy worker checks every draft row and its KV. The texts repeat themselves, so that drafts are accepted.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import pytest

from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.workers.state import WorkerState
from simulator.schedule import FIRST_WITH_DRAFTS
from simulator.soak import explain, play_seed
from simulator.system import WorkerEnd
from tests.simulation.test_control_plane import Run, SwapRun
from tests.simulation.test_hostile_policies import HostileRun
from tests.simulation.test_offline import OfflineRun
from tests.simulation.test_poison import PoisonRun
from tests.support.hostile import everything_wrong
from tests.unit.scheduler.test_drafting import check_batch

NUM_SEEDS, NUM_WORLDS, BATCH = 60, 400, 50


class DraftRun(Run):
    """Most texts repeat themselves. `seen`: what happened while sequences drafted."""

    speculation: ClassVar[dict[str, Any]] = {
        "speculative_tokens": 5,
        "speculative_max_rows": 6,
        "speculative_ngram_min": 1,
    }
    tenant_limits = (0,)

    def __init__(self, seed: int) -> None:
        self.begin(seed)
        super().__init__(seed)

    def begin(self, seed: int) -> None:
        self.periods = random.Random(f"period {seed}")
        self.seen: Counter[str] = Counter()

    def period(self) -> int:
        return self.periods.choice([0, 1, 1, 2, 3])

    def tend(self) -> None:
        super().tend()
        for worker in self.system.scheduler.workers.values():
            check_batch(worker.batch)
            self.seen["paused beside"] += bool(worker.batch.drafting and worker.batch.paused)
            self.seen["offline"] += bool(worker.batch.drafting.keys() & worker.batch.offline)

    def fault(self) -> None:
        before = {end.id: end for end in self.system.workers if self.drafts(end)}
        super().fault()
        lost = [end for end in before.values() if end not in self.system.workers]
        self.seen["lost worker"] += bool(lost)
        self.seen["lost cache"] += bool(before) and not lost and not self.system.scheduler.has_cache

    def drafts(self, end: WorkerEnd) -> bool:
        return bool(self.system.scheduler.workers[end.id].batch.drafting)


class DraftSwapRun(DraftRun, SwapRun):
    """With swaps, drains, and pools that are too small."""


class DraftOfflineRun(DraftRun, OfflineRun):
    """With offline requests, which yield to online ones."""


class DraftPoisonRun(DraftRun, PoisonRun):
    """With requests that make their steps fail, also in rows beside draft rows."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        lost = SchedulerCore._lose

        def counted(worker: WorkerState, *args: Any) -> None:
            self.seen["blamed draft row"] += any(step.drafts for step in worker.in_flight)
            lost(self.system.scheduler, worker, *args)

        self.system.scheduler._lose = counted  # type: ignore[method-assign,assignment]


class DraftHostileRun(DraftRun, HostileRun):
    """With a policy that misbehaves."""

    def __init__(self, seed: int) -> None:
        self.begin(seed)
        wrong = everything_wrong()
        HostileRun.__init__(self, seed, *wrong[seed * 7 % len(wrong)], rate=[0.2, 1.0][seed % 2])


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the drafting sequences that were preempted, by mode."""
    preempted: Counter[str] = Counter()
    preempt = Lifecycle.preempt

    def counted(self: Lifecycle, request: Request, requeue: str, mode: str, why: str) -> None:
        drafting = request.held.slot in self._workers[request.held.worker].batch.drafting
        preempt(self, request, requeue, mode, why)
        preempted["swap" if request.held.swapped_on else "recompute"] += drafting

    monkeypatch.setattr(Lifecycle, "preempt", counted)
    return preempted


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (DraftRun, ["paused beside", "lost worker", "lost cache", "recompute"]),
        (DraftSwapRun, ["swap", "recompute", "lost worker", "lost cache"]),
        (DraftOfflineRun, ["offline", "recompute"]),
        (DraftPoisonRun, ["blamed draft row", "lost cache"]),
        (DraftHostileRun, []),
    ],
)
def test_every_stream_equals_its_undisturbed_run(
    kind: type[DraftRun], events: list[str], preempted: Counter[str]
) -> None:
    """`events`: what has to happen while sequences draft, or the test shows little."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        run = kind(seed)
        try:
            run.play()
            run.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        counters = run.system.scheduler.counters
        seen["accepted"] += counters.num_accepted_tokens
        seen["rejected"] += counters.num_draft_tokens - counters.num_accepted_tokens
        seen += run.seen
    seen += preempted
    assert min(seen["accepted"], seen["rejected"]) > 50, seen
    assert min((seen[event] for event in events), default=3) >= 3, seen


@pytest.mark.parametrize("first", range(FIRST_WITH_DRAFTS, FIRST_WITH_DRAFTS + NUM_WORLDS, BATCH))
def test_every_stream_equals_its_undisturbed_run_although_services_die(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores: list[SchedulerCore] = []
    init = SchedulerCore.__init__

    def recorded(self: SchedulerCore, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        cores.append(self)

    monkeypatch.setattr(SchedulerCore, "__init__", recorded)
    for seed in range(first, first + BATCH):
        outcome = play_seed(seed)
        assert not outcome.error, explain(outcome)
    assert sum(core.counters.num_accepted_tokens for core in cores) > BATCH
