"""Play schedules until the run is stopped: `python -m simulator.soak`. Play one again: `... --replay FILE`.

A failing schedule is shrunk, printed as JSON and ends the run with status 1. The printed schedule can be played again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simulator.schedule import Schedule, random_schedule, shrink
from simulator.world import World

REPORT_S = 10.0


@dataclass(frozen=True, slots=True)
class SoakOutcome:
    """The result of a schedule: how much happened, and what went wrong."""

    schedule: Schedule
    num_events: int
    error: str = ""


def play(schedule: Schedule) -> SoakOutcome:
    """Any exception is a failure: the cores raise none on purpose."""
    world = None
    try:
        world = World(schedule)
        world.run()
    except Exception as error:  # a failing seed is what the soak looks for
        return SoakOutcome(schedule, world.network.num_events if world else 0, f"{type(error).__name__}: {error}")
    return SoakOutcome(schedule, world.network.num_events)


def play_seed(seed: int) -> SoakOutcome:
    return play(random_schedule(seed))


def explain(outcome: SoakOutcome) -> str:
    """What fails, and how to reproduce it, with as few parts as possible."""
    small = play(shrink(outcome.schedule, lambda schedule: bool(play(schedule).error)))
    return (
        f"seed {outcome.schedule.seed}: {outcome.error}\n"
        f"shrunk to {len(small.schedule.asks)} requests and {len(small.schedule.faults)} faults: {small.error}\n"
        f"again: echo '{small.schedule.to_json()}' | python -m simulator.soak --replay -"
    )


def _outcomes(first_seed: int, processes: int) -> Iterator[SoakOutcome]:
    with multiprocessing.Pool(processes) as pool:
        seed = first_seed
        while True:
            yield from pool.imap_unordered(play_seed, range(seed, seed + 500), chunksize=5)
            seed += 500


def soak(first_seed: int, seconds: float, processes: int) -> int:
    """Exit status: 1 as soon as a seed fails, 0 when the time is over."""
    began_s = reported_s = time.monotonic()
    num_seeds = num_events = 0
    for outcome in _outcomes(first_seed, processes):
        num_seeds, num_events, now_s = num_seeds + 1, num_events + outcome.num_events, time.monotonic()
        if outcome.error:
            print(explain(outcome), file=sys.stderr)
            return 1
        over = now_s - began_s > seconds
        if over or now_s - reported_s > REPORT_S:
            reported_s = now_s
            rate = num_events / (now_s - began_s)
            print(f"{now_s - began_s:7.0f} s  {num_seeds:9,} seeds  {num_events:12,} events  {rate:8,.0f} events/s")
        if over:
            break
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=int(time.time()) * 1000, help="default: by the clock")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="default: until told to stop")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", metavar="FILE", help="play the schedule in this file (-: standard input) instead")
    arguments = parser.parse_args()
    if arguments.replay:
        text = sys.stdin.read() if arguments.replay == "-" else Path(arguments.replay).read_text()
        outcome = play(Schedule.from_json(text))
        print(outcome.error or f"passes, {outcome.num_events} events")
        return bool(outcome.error)
    try:
        return soak(arguments.first_seed, arguments.seconds, arguments.processes)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
