"""Random kills under mixed traffic, every answer checked token for token.

python -m tests.chaos.soak --minutes 30 [--clients 8] [--seed 1] [--out FILE]

Status 1 if a token was wrong, lost or doubled, a block is still used at rest, a service's memory has grown, or one did
not come back. Totals go to FILE.json; a sentence of them and the table of moments, for docs/reliability.md, to FILE.md.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.matrix import FAULTS, SERVICES, Cell, fault, new_stack, up, wait_rest, wait_services
from tests.chaos.traffic import Seen, Traffic
from tests.support.asking import asker
from tests.support.stack import Stack

# Longer than a frozen service stays so: a client gives up its gateway when nothing else explains the silence.
PATIENCE_S = 10.0
SETTLE_S = 5.0
TWO_AT_ONCE_SHARE = 0.25
# Between faults: sometimes the next comes while the last is hardly over.
MOST_BETWEEN_S = 8.0
SAMPLE_S = 2.0
GROWTH_MIB = 64.0
LAST_ANSWERS_S = 120.0


@dataclass(frozen=True)
class Moment:
    """`end_s`: all services are there again."""

    what: str
    begin_s: float
    end_s: float


@dataclass
class Memory:
    """Resident MiB of each service, oldest first."""

    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def watch(self, stack: Stack) -> None:
        while True:
            for name, process in list(stack.processes.items()):
                try:
                    self.samples[name].append(psutil.Process(process.pid).memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue
            await asyncio.sleep(SAMPLE_S)

    def halves(self) -> dict[str, tuple[float, float]]:
        """The most that each took in the first and in the second half."""
        middles = {name: len(samples) // 2 for name, samples in self.samples.items() if len(samples) > 1}
        return {name: (max(self.samples[name][:at]), max(self.samples[name][at:])) for name, at in middles.items()}


async def kill(stack: Stack, rng: random.Random, moments: list[Moment], end_s: float) -> None:
    """One fault after the other, sometimes two at once, until `end_s`; then everything is there."""
    loop = asyncio.get_running_loop()
    while loop.time() < end_s:
        services = rng.sample(SERVICES, 2 if rng.random() < TWO_AT_ONCE_SHARE else 1)
        cells = sorted(Cell(service, rng.choice(FAULTS), "") for service in services)
        begin_s = loop.time()
        await asyncio.gather(*(fault(stack, cell) for cell in cells))
        await asyncio.to_thread(wait_services, stack)
        what = " and ".join(f"{cell.service} {cell.fault}" for cell in cells)
        moments.append(Moment(what, begin_s, loop.time()))
        print(f"{end_s - begin_s:6.0f} s to go: {what}, all back after {loop.time() - begin_s:.1f} s", flush=True)
        await asyncio.sleep(rng.uniform(0.0, MOST_BETWEEN_S))


def report(moments: list[Moment], seen: list[Seen]) -> str:
    """Markdown: of each kind of moment, what the clients saw from its beginning until it was over and settled, or until
    the next one.
    """
    rows: dict[str, list[tuple[float, list[float], int, int]]] = defaultdict(list)
    nexts_s = [moment.begin_s for moment in moments[1:]] + [float("inf")]
    for moment, next_s in zip(moments, nexts_s, strict=True):
        end_s = min(moment.end_s + SETTLE_S, next_s)
        there = [one for one in seen if one.began_s < moment.begin_s and one.ended_s > moment.begin_s]
        pauses = [one.longest_pause_s(moment.begin_s, end_s) for one in there]
        breaks = sum(any(moment.begin_s < time < end_s for time in one.break_times) for one in there)
        wrong = sum(bool(one.problem) for one in there)
        what = moment.what if " and " not in moment.what else "two at once"
        rows[what].append((moment.end_s - moment.begin_s, pauses, breaks, wrong))
    lines = [
        "| moment | times | all back after s, p50 / max | requests met | their pause s, p50 / max | resumed | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    for what, cases in sorted(rows.items()):
        backs = [case[0] for case in cases]
        pauses = [pause for case in cases for pause in case[1]] or [0.0]
        met, resumed, wrong = sum(len(c[1]) for c in cases), sum(c[2] for c in cases), sum(c[3] for c in cases)
        lines.append(
            f"| {what} | {len(cases)} | {statistics.median(backs):.1f} / {max(backs):.1f} | {met} "
            f"| {statistics.median(pauses):.1f} / {max(pauses):.1f} | {resumed} | {wrong} |"
        )
    return "\n".join(lines) + "\n"


def totals(seen: list[Seen], memory: Memory, leak: str) -> dict[str, Any]:
    kinds = Counter(one.name for one in seen)
    return {
        "requests": len(seen),
        "kinds": dict(sorted(kinds.items())),
        "cancelled": sum(one.is_cancelled for one in seen),
        "resumed": sum(bool(one.break_times) for one in seen),
        "wrong": [f"{one.name}: {one.problem}"[:600] for one in seen if one.problem],
        "leaked": leak,
        "memory_mib": {name: [round(first), round(last)] for name, (first, last) in memory.halves().items()},
    }


async def soak(stack: Stack, minutes: float, num_clients: int, seed: int) -> tuple[str, dict[str, Any]]:
    """The table of moments, and the totals. Where a service does not come back it ends early, and says so."""
    moments: list[Moment] = []
    memory = Memory()
    broken = ""
    async with asker(PATIENCE_S) as http:
        traffic = Traffic(stack.gateways, http, seed)
        await traffic.learn()
        print(f"{traffic.num_asked} answers are known", flush=True)
        watching = asyncio.create_task(memory.watch(stack))
        serving = asyncio.create_task(traffic.run(num_clients))
        end_s = asyncio.get_running_loop().time() + 60 * minutes
        try:
            await kill(stack, random.Random(seed), moments, end_s)
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
    leak = ""
    try:
        await asyncio.to_thread(wait_rest, stack)
    except AssertionError as error:
        leak = str(error).partition("\n")[0]
    run = {"minutes": minutes, "clients": num_clients, "moments": len(moments), "broken": broken.partition("\n")[0]}
    return report(moments, traffic.seen), run | totals(traffic.seen, memory, leak)


def sentence(result: dict[str, Any]) -> str:
    """The totals, for docs/reliability.md."""
    sizes = ", ".join(f"{name} {first} / {last}" for name, (first, last) in sorted(result["memory_mib"].items()))
    return (
        f"{result['minutes']:g} minutes with {result['clients']} clients: {result['requests']} requests "
        f"({result['cancelled']} cancelled, {result['resumed']} resumed), {result['moments']} moments; "
        f"{len(result['wrong'])} wrong, {'blocks leaked' if result['leaked'] else 'nothing leaked'}. "
        f"The most resident MiB in the first and in the second half: {sizes}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="of what is asked and of what is killed when")
    parser.add_argument("--out", type=Path, help="where the results go, without suffix")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    print(f"logs in {folder}", flush=True)
    stack = new_stack(folder)
    try:
        text, result = asyncio.run(soak(up(stack), arguments.minutes, arguments.clients, arguments.seed))
    finally:
        stack.down()
    result["grown"] = {name: sizes for name, sizes in result["memory_mib"].items() if sizes[1] - sizes[0] > GROWTH_MIB}
    text = f"{sentence(result)}\n{text}"
    print(text)
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text)
        arguments.out.with_suffix(".json").write_text(f"{json.dumps(result, indent=1)}\n")
    return int(any(result[name] for name in ("wrong", "leaked", "grown", "broken")))


if __name__ == "__main__":
    sys.exit(main())
