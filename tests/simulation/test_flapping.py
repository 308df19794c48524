"""Links of workers break all the time, and the workers come back each time. With the default settings no request
fails."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler_svc.core.faults.suspects import Suspects
from simulator.schedule import Fault, FaultKind, PartySizes, Schedule, random_schedule
from simulator.soak import explain, play
from tests.simulation.mutants import nothing

NUM_SEEDS, BATCH, NUM_FAULTS = 40, 10, 30
KINDS: list[FaultKind] = ["cut", "cut", "cut", "silence", "freeze"]


def flapping(seed: int) -> Schedule:
    rng, schedule = random.Random(f"flapping {seed}"), random_schedule(seed)

    def fault() -> Fault:
        target = f"worker-{rng.randrange(PartySizes.of(seed).num_workers)}"
        return Fault(round(rng.uniform(0.1, 5.0), 4), rng.choice(KINDS), target, round(rng.uniform(0.0, 6.0), 4))

    faults = sorted((fault() for _ in range(NUM_FAULTS)), key=lambda one: one.at_s)
    asks = (replace(ask, at_s=round(rng.uniform(0.1, 4.0), 4)) for ask in schedule.asks for _ in range(3))
    return replace(schedule, asks=tuple(asks), faults=tuple(faults))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_no_request_fails(first: int) -> None:
    for seed in range(first, first + BATCH):
        outcome = play(flapping(seed))
        assert not outcome.error, explain(outcome)


def test_requests_fail_if_no_blame_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspects, "came_back", nothing)
    for seed in (3, 10):
        assert "was the only request in 2 failed steps in a row" in play(flapping(seed)).error
