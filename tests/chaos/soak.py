"""Random kills under mixed traffic, every answer checked token for token.

python -m tests.chaos.soak --minutes 30 [--clients 8] [--seed 1] [--out FILE]

Status 1 if a token was wrong, lost or doubled, a client got an error or lost its connection though its gateway had no
fault, a request did not end, a block was still used at rest, a process has grown, or a service did not come back.
Before some faults that end the cache or the scheduler, traffic pauses and used blocks are counted. In the last fifth no
process is ended. Totals go to FILE.json; a summary and the table of moments to FILE.md.
docs/reliability-measurements.md sums them up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.chaos.matrix import fault, new_stack, up, wait_rest, wait_services
from tests.chaos.moments import FAULTS, SERVICES, Cell, Moment, judge
from tests.chaos.traffic import Seen, Traffic
from tests.support.asking import asker
from tests.support.stack import Stack

# Seconds of silence after which a client leaves its gateway: longer than a service stays frozen.
PATIENCE_S = 10.0
SETTLE_S = 5.0
TWO_AT_ONCE_SHARE = 0.25
# Longest time between faults; the next fault may follow at once.
MOST_BETWEEN_S = 8.0
# Faults that end a process. There are none in the last part of the soak, so that each process lives long enough.
ENDINGS = ("SIGKILL", "SIGTERM")
CALM_SHARE = 0.2
BETWEEN_RESTS_S = 120.0
SAMPLE_S = 2.0
# A process fills its pools and caches during WARM_UP_S. A process that lives less than LIFE_S after it is not judged.
WARM_UP_S, LIFE_S = 60.0, 120.0
GROWTH_MIB = 8.0
LAST_ANSWERS_S = 120.0


class Growth(NamedTuple):
    """The largest size of a process in the first and in the second half of its life after the warm-up."""

    life_s: float
    first_mib: float
    second_mib: float

    @property
    def mib(self) -> float:
        return self.second_mib - self.first_mib


@dataclass
class Memory:
    """Samples of resident MiB, oldest first, by the service's name and the process id."""

    samples: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    async def watch(self, stack: Stack) -> None:
        while True:
            for name, process in list(stack.processes.items()):
                try:
                    self.samples[name, process.pid].append(psutil.Process(process.pid).memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue
            await asyncio.sleep(SAMPLE_S)

    def growth(self) -> dict[str, Growth]:
        """Per service, the process that has grown most, of the processes that lived long enough."""
        worst: dict[str, Growth] = {}
        for (name, _), samples in self.samples.items():
            life = samples[int(WARM_UP_S / SAMPLE_S) :]
            if len(life) * SAMPLE_S < LIFE_S:
                continue
            middle = len(life) // 2
            growth = Growth(round(len(samples) * SAMPLE_S), max(life[:middle]), max(life[middle:]))
            if name not in worst or growth.mib > worst[name].mib:
                worst[name] = growth
        return worst


@dataclass
class Killer:
    """Causes one fault after the other, sometimes two at once."""

    stack: Stack
    traffic: Traffic
    rng: random.Random
    moments: list[Moment] = field(default_factory=list)
    rests: int = 0
    leaks: list[str] = field(default_factory=list)
    _rested_s: float = 0.0

    async def run(self, end_s: float, faults: Sequence[str]) -> None:
        """Causes faults until `end_s`, then waits for all services. Raises AssertionError if a service stays away."""
        loop = asyncio.get_running_loop()
        while loop.time() < end_s:
            services = self.rng.sample(SERVICES, 2 if self.rng.random() < TWO_AT_ONCE_SHARE else 1)
            cells = sorted(Cell(service, self.rng.choice(faults), "") for service in services)
            ends_cache_or_scheduler = any(
                cell.service in ("cache", "scheduler") and cell.fault in ENDINGS for cell in cells
            )
            if ends_cache_or_scheduler and loop.time() - self._rested_s > BETWEEN_RESTS_S:
                await self.rest()
                await asyncio.sleep(self.rng.uniform(1.0, 4.0))
            moment = Moment(cells, self.stack.gateways[0], loop.time())
            self.moments.append(moment)
            try:
                await asyncio.gather(*(fault(self.stack, cell) for cell in cells))
                await asyncio.to_thread(wait_services, self.stack)
            finally:
                moment.end_s = loop.time()
            took_s = moment.end_s - moment.begin_s
            print(f"{end_s - moment.begin_s:6.0f} s to go: {moment.what}, all back after {took_s:.1f} s", flush=True)
            await asyncio.sleep(self.rng.uniform(0.0, MOST_BETWEEN_S))

    async def rest(self) -> None:
        """Pauses the traffic and checks that no block is used: a restart would hide a leak."""
        try:
            await asyncio.wait_for(self.traffic.pause(), LAST_ANSWERS_S)
            await asyncio.to_thread(wait_rest, self.stack)
        except TimeoutError:
            raise AssertionError(f"requests did not end within {LAST_ANSWERS_S:.0f} s") from None
        except AssertionError as error:
            self.leaks.append(f"before moment {len(self.moments) + 1}: {first_line(error)}")
        finally:
            self.traffic.go_on()
        self.rests, self._rested_s = self.rests + 1, asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Judged:
    """A request with its problems: wrong tokens, and broken connections that no fault explains. `elsewhere_s`: when its
    client left a healthy gateway because of a fault in another service."""

    seen: Seen
    problems: list[str]
    elsewhere_s: list[float]

    @classmethod
    def of(cls, seen: Seen, moments: list[Moment]) -> Judged:
        verdicts = [(broken, judge(broken, moments)) for broken in seen.breaks]
        problems = [f"at {broken.time_s:.1f} s {verdict.problem}" for broken, verdict in verdicts if verdict.problem]
        if seen.problem:
            during = [moment.what for moment in moments if moment.overlaps(seen.began_s, seen.ended_s)]
            problems.append(f"until {seen.ended_s:.1f} s, during {', then '.join(during) or 'nothing'}: {seen.problem}")
        return cls(seen, problems, [broken.time_s for broken, verdict in verdicts if verdict.elsewhere])


def report(moments: list[Moment], requests: list[Judged]) -> str:
    """Markdown: per kind of moment, what the clients saw from its first fault until SETTLE_S after all services were
    back, or until the next moment.
    """
    rows: dict[str, list[tuple[float, list[float], int, int, int]]] = defaultdict(list)
    nexts_s = [moment.begin_s for moment in moments[1:]] + [float("inf")]
    for moment, next_s in zip(moments, nexts_s, strict=True):
        begin_s, end_s = moment.begin_s, min(moment.end_s + SETTLE_S, next_s)
        there = [one for one in requests if moment.overlaps(one.seen.began_s, one.seen.ended_s)]
        pauses = [one.seen.longest_pause_s(begin_s, end_s) for one in there]
        resumed = sum(any(begin_s < broken.time_s < end_s for broken in one.seen.breaks) for one in there)
        elsewhere = sum(any(begin_s < time_s < end_s for time_s in one.elsewhere_s) for one in there)
        wrong = sum(bool(one.problems) for one in there)
        what = moment.what if len(moment.cells) == 1 else "two at once"
        rows[what].append((moment.end_s - begin_s, pauses, resumed, elsewhere, wrong))
    lines = [
        "| moment | times | all back after s, p50 / max | requests met | their pause s, p50 / max "
        "| asked again | out of patience | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for what, cases in sorted(rows.items()):
        backs = [case[0] for case in cases]
        pauses = [pause for case in cases for pause in case[1]] or [0.0]
        resumed, elsewhere, wrong = (sum(counts) for counts in zip(*(case[2:] for case in cases), strict=True))
        lines.append(
            f"| {what} | {len(cases)} | {statistics.median(backs):.1f} / {max(backs):.1f} "
            f"| {sum(len(case[1]) for case in cases)} "
            f"| {statistics.median(pauses):.1f} / {max(pauses):.1f} | {resumed} | {elsewhere} | {wrong} |"
        )
    return "\n".join(lines) + "\n"


def totals(requests: list[Judged], memory: Memory, leaks: list[str]) -> dict[str, Any]:
    kinds = Counter(one.seen.name for one in requests)
    breaks = Counter(broken.kind for one in requests for broken in one.seen.breaks)
    growth = memory.growth()
    return {
        "requests": len(requests),
        "kinds": dict(sorted(kinds.items())),
        "cancelled": sum(one.seen.is_cancelled for one in requests),
        "asked_again": sum(bool(one.seen.breaks) for one in requests),
        "breaks": dict(sorted(breaks.items())),
        "out_of_patience": sum(bool(one.elsewhere_s) for one in requests),
        "wrong": [f"{one.seen.name}: {'; '.join(one.problems)}"[:900] for one in requests if one.problems],
        "leaked": leaks,
        "memory": {name: one._asdict() for name, one in sorted(growth.items())},
        "grown": [name for name, one in sorted(growth.items()) if one.mib > GROWTH_MIB],
    }


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


async def soak(stack: Stack, minutes: float, num_clients: int, seed: int) -> tuple[str, dict[str, Any]]:
    """Returns the table of moments and the totals. `broken`: why the soak ended early, or ""."""
    memory = Memory()
    broken = ""
    async with asker(PATIENCE_S) as http:
        traffic = Traffic(stack.gateways, http, seed)
        await traffic.learn()
        print(f"{traffic.num_asked} answers are known", flush=True)
        watching = asyncio.create_task(memory.watch(stack))
        serving = asyncio.create_task(traffic.run(num_clients))
        begin_s = asyncio.get_running_loop().time()
        killer = Killer(stack, traffic, random.Random(seed))
        try:
            await killer.run(begin_s + 60 * minutes * (1 - CALM_SHARE), FAULTS)
            await killer.rest()
            await killer.run(begin_s + 60 * minutes, [fault for fault in FAULTS if fault not in ENDINGS])
        except AssertionError as error:
            broken = str(error)
            print(broken, flush=True)
        traffic.stop()
        await asyncio.wait([serving], timeout=LAST_ANSWERS_S)
        if not serving.done():
            broken = broken or f"requests did not end within {LAST_ANSWERS_S:.0f} s"
        for task in (serving, watching):
            task.cancel()
        clients, _ = await asyncio.gather(serving, watching, return_exceptions=True)
        if isinstance(clients, Exception):
            broken = broken or f"a client failed: {clients!r}"
    try:
        await asyncio.to_thread(wait_rest, stack)
    except AssertionError as error:
        killer.leaks.append(f"in the end: {first_line(error)}")
    run = {"minutes": minutes, "clients": num_clients, "moments": len(killer.moments), "rests": killer.rests}
    requests = [Judged.of(seen, killer.moments) for seen in traffic.seen]
    result = run | {"broken": broken.partition("\n")[0]} | totals(requests, memory, killer.leaks)
    return report(killer.moments, requests), result


def sentence(result: dict[str, Any]) -> str:
    """The totals as text."""
    sizes = ", ".join(
        f"{name} {one['first_mib']:.0f} / {one['second_mib']:.0f} ({one['life_s'] / 60:.0f} min)"
        for name, one in result["memory"].items()
    )
    return (
        f"{result['minutes']:g} minutes with {result['clients']} clients: {result['requests']} requests "
        f"({result['cancelled']} cancelled, {result['asked_again']} asked for again, of these "
        f"{result['out_of_patience']} because a client lost patience with a healthy gateway), "
        f"{result['moments']} moments; "
        f"{len(result['wrong'])} wrong, {'blocks leaked' if result['leaked'] else 'nothing leaked'} "
        f"at {result['rests'] + 1} rests. The most resident MiB in the first and in the second half of the life of the "
        f"process of each service that grew most: {sizes}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="decides the requests, the faults and their times")
    parser.add_argument("--out", type=Path, help="where the results go, without suffix")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    print(f"logs in {folder}", flush=True)
    stack = new_stack(folder)
    try:
        text, result = asyncio.run(soak(up(stack), arguments.minutes, arguments.clients, arguments.seed))
    finally:
        stack.down()
    text = f"{sentence(result)}\n{text}"
    print(text)
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text)
        arguments.out.with_suffix(".json").write_text(f"{json.dumps(result, indent=1)}\n")
    return int(any(result[name] for name in ("wrong", "leaked", "grown", "broken")))


if __name__ == "__main__":
    sys.exit(main())
