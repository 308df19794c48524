"""Simulates all services under one clock, with a network that delays, breaks and falls silent, and parties that die,
freeze and come back. Every client gets the tokens of an undisturbed run, each once and in order. Nothing leaks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cache_svc.core.cache import CacheCore
from scheduler_svc.core.scheduler import SchedulerCore
from services.runtime.fence import StaleScheduler
from simulator.schedule import Schedule, random_schedule, shrink
from simulator.soak import explain, play, play_seed
from simulator.world import World
from tests.simulation.mutants import MUTANTS, Mutant, not_resubmitted

NUM_SEEDS, BATCH = 2000, 50


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_every_stream_equals_its_undisturbed_run_although_services_die(first: int) -> None:
    for seed in range(first, first + BATCH):
        outcome = play_seed(seed)
        assert not outcome.error, explain(outcome)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not play_seed(mutant.caught_by).error
    mutant.plant(monkeypatch)
    assert play_seed(mutant.caught_by).error


def test_the_documented_mutants_are_these() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability-tests.md").read_text()
    section = page.partition("## Planted mistakes\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{mutant.name}` | {mutant.mistake} | {mutant.caught_by} |" for mutant in MUTANTS]


def test_the_seeds_cover_every_fault_and_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the seeds could pass without testing anything."""
    schedulers, caches = _made(monkeypatch, SchedulerCore), _made(monkeypatch, CacheCore)
    refusals = _made(monkeypatch, StaleScheduler)
    seen: Counter[str] = Counter()
    for seed in range(100):
        world = World(random_schedule(seed))
        world.run()
        seen.update(f"fault: {fault.kind}" for fault in world.schedule.faults)
        seen.update(
            f"drained: {fault.target.partition('-')[0]}" for fault in world.schedule.faults if fault.kind == "drain"
        )
        copies = world.clients.copies
        seen["resubmitted"] += sum(request.attempt > 1 for copy in copies for request in copy.requests)
        seen["left with its gateway"] += sum(client.gone for client in world.clients.all)
        seen["lost a gateway and came back"] += sum(copy.gone and not copy.client.gone for copy in copies)
        seen["resumed after its tokens"] += sum(any(copy.num_brought) for copy in copies)
        seen["joined its own copy"] += sum(client.num_taken_up for client in world.clients.all)
        seen["two copies at once"] += sum(client.num_at_once > 1 for client in world.clients.all)
        seen["taken over by another scheduler"] += len(world.etcd.leader_terms) > 1
    seen["refused a stale scheduler"] = len(refusals)
    for name in ("preempted", "swapped_in", "requeued", "restored"):
        seen[name] = sum(getattr(core.counters, name) for core in schedulers)
    for name in ("copied_blocks", "forked_sequences", "evicted_blocks", "demoted_blocks", "promoted_blocks"):
        seen[name] = sum(getattr(core.counters, name) for core in caches)
    assert len(seen) == 7 + 5 + 7 + 1 + 4 + 5
    assert min(seen.values()) >= 3, seen


def _made(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[Any]:
    """A list that receives each object of this class when it is made."""
    made: list[Any] = []
    init = kind.__init__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", recorded)
    return made


def test_a_run_can_be_repeated_event_by_event() -> None:
    for seed in (6, 10):
        runs = [World(random_schedule(seed)) for _ in range(2)]
        for world in runs:
            world.run()
        first, second = (
            (w.network.num_events, w.network.now_s, [client.got for client in w.clients.all]) for w in runs
        )
        assert first == second


def test_a_failing_schedule_is_shrunk_and_can_be_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    not_resubmitted(monkeypatch)
    outcome = play_seed(next(mutant.caught_by for mutant in MUTANTS if mutant.plant is not_resubmitted))
    small = shrink(outcome.schedule, lambda schedule: bool(play(schedule).error))
    assert len(small.asks) == 1
    assert len(small.faults) == 1
    assert Schedule.from_json(small.to_json()) == small
    message = explain(outcome)
    again = Schedule.from_json(message.split("echo '")[1].split("'")[0])
    assert again == small
    assert play(again).error
