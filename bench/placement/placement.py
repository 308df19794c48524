"""Which worker a request goes to: every placement policy on the same workloads and fleets, in simulation.

The real scheduler and cache cores run on a virtual clock with simulated workers (simulator/cluster.py). Each workload
runs twice for each fleet of equal workers: open (Poisson arrivals at 80 % of the fleet's capacity) and saturated (a
closed loop without pauses). Further runs have few clients, an uneven fleet, a worker that joins and one that dies.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler_svc.policies.registry import build, choose
from simulator.cluster import Cluster
from simulator.fleet import WorkerSpec
from simulator.workloads import WORKLOADS, make_sessions

OURS = "predicted-time"
POLICIES = ("round-robin", "least-loaded", "two-choices", "prefix-first", "cache-aware", "overlap-cost", OURS)
SEEDS = {2: 2, 4: 2, 16: 1}  # runs of a case by the number of workers; figures are their means
FEW_CLIENTS = 16  # for each worker: a sixth of a saturated run's
WARM_UP = 0.2  # of a run's requests
WITHIN = 0.02  # figures this close to the best count as equal to it: a few seeds cannot show a smaller difference
# For each figure, whether more is better. No figure is negative.
FIGURES = {
    "output_tokens_per_s": True,
    "ttft_p50_ms": False,
    "ttft_p99_ms": False,
    "cached_share": True,
    "imbalance": False,
}


HEADS = ("tokens/s", "TTFT p50, ms", "TTFT p99, ms", "cached", "imbalance")
FORMATS = dict(zip(FIGURES, (",.0f", ",.1f", ",.0f", ".1%", ".2f"), strict=True))
Row = dict[str, Any]


class Fleet(NamedTuple):
    """`capacity` in workers of the default cost, on average over the run."""

    name: str
    workers: tuple[WorkerSpec, ...]
    capacity: float


@dataclass(frozen=True, slots=True)
class Case:
    """`concurrency`: sessions that run at any time, divided by the fleet's capacity; 0: the run is open. `scale`: the
    share of the workload's sessions that run."""

    workload: str
    fleet: Fleet
    load: str
    concurrency: int
    scale: float = 0.3

    @property
    def num_workers(self) -> int:
        return len(self.fleet.workers)

    @property
    def key(self) -> dict[str, Any]:
        return {"workload": self.workload, "fleet": self.fleet.name, "workers": self.num_workers, "load": self.load}


def equal_fleet(num_workers: int) -> Fleet:
    return Fleet("equal", (WorkerSpec(),) * num_workers, num_workers)


def open_case(workload: str, fleet: Fleet, scale: float = 0.3) -> Case:
    return Case(workload, fleet, "open", 0, scale)


def saturated_case(workload: str, fleet: Fleet, scale: float = 0.3) -> Case:
    return Case(workload, fleet, "saturated", WORKLOADS[workload].concurrency, scale)


def cases() -> Iterator[Case]:
    for num_workers, scale in ((2, 0.5), (4, 0.3), (16, 0.15)):
        fleet = equal_fleet(num_workers)
        for workload in WORKLOADS:
            yield open_case(workload, fleet, scale)
            yield saturated_case(workload, fleet, scale)
        yield Case("shared-prompt", fleet, "few clients", FEW_CLIENTS, scale)
    one, three = WorkerSpec(), (WorkerSpec(),) * 3
    fast = Fleet("one twice as fast", (one.altered(cost=one.cost.faster(2)), *three), 5)
    small = Fleet("one with a sixth of the blocks", (one.altered(num_blocks=one.num_blocks // 6), *three), 4)
    for workload in ("zipf", "no-sharing"):
        yield open_case(workload, fast)
        yield saturated_case(workload, fast)
    yield open_case("conversations", small)
    # Arrivals last about 3 s. The capacity of a fleet that changes is about its mean over this time.
    for workload in ("shared-prompt", "zipf"):
        yield open_case(workload, Fleet("a fourth joins after 1 s", (*three, one.altered(joins_s=1.0)), 3.6))
        yield open_case(workload, Fleet("one of four dies after 1 s", (one.altered(dies_s=1.0), *three), 3.2))


def play(case: Case, policy: str, seed: int) -> dict[str, float]:
    """One run's figures."""
    workload = WORKLOADS[case.workload]
    cluster = Cluster(case.fleet.workers, build(choose("", {"placement": policy})), seed)
    sessions = make_sessions(workload, case.fleet.capacity, seed, case.scale)
    cluster.run(sessions, round(case.concurrency * case.fleet.capacity))
    return figures(cluster, saturated=case.concurrency > 0)


def figures(cluster: Cluster, saturated: bool) -> dict[str, float]:
    """The throughput of a saturated run ends with the start of its last session: after that it is not saturated. TTFT
    leaves out the first fifth of the requests, because they find cold caches."""
    warm = cluster.asked[round(WARM_UP * len(cluster.asked)) :]
    ttft_ms = [1e3 * (asked.first_s - asked.asked_s) for asked in warm]
    until_s = cluster.last_start_s if saturated else cluster.now_s
    num_output_tokens = sum(count for at_s, count in cluster.tokens_by_s if at_s <= until_s)
    num_prompt_tokens = sum(len(asked.prompt) for asked in cluster.asked)
    busy = [lived.worker.busy_s / lived.alive_s for lived in cluster.lived]
    sampled = [lived.worker.num_sampled / lived.alive_s for lived in cluster.lived]
    return {
        "output_tokens_per_s": num_output_tokens / until_s,
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "cached_share": sum(asked.cached_tokens for asked in cluster.asked) / num_prompt_tokens,
        "imbalance": max(busy) / statistics.mean(busy),
        "token_imbalance": max(sampled) / statistics.mean(sampled),
        "requests": len(cluster.asked),
        "duration_s": cluster.now_s,
    }


def _play(job: tuple[Case, str, int]) -> dict[str, float]:
    return play(*job)


def compare(
    chosen: Iterable[Case], policies: Iterable[str] = POLICIES, processes: int = 2, seeds: dict[int, int] = SEEDS
) -> list[Row]:
    """A row for each case and policy: the means over its seeds."""
    runs = [(case, policy) for case in chosen for policy in policies]
    jobs = [(case, policy, seed) for case, policy in runs for seed in range(seeds[case.num_workers])]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        results = iter(list(pool.map(_play, jobs, chunksize=1)))
    rows = []
    for case, policy in runs:
        played = [next(results) for _ in range(seeds[case.num_workers])]
        means = {name: statistics.mean(one[name] for one in played) for name in played[0]}
        rows.append({**case.key, "policy": policy, "seeds": len(played), **means})
    return rows


def other_rows(earlier: Iterable[Row], policies: Iterable[str], chosen: Iterable[Case]) -> list[Row]:
    """The earlier rows of all other policies. Raises ValueError if they are not of the same cases: then they cannot be
    compared with new rows of `policies`."""
    others = [row for row in earlier if row["policy"] not in policies]
    differing = {title(row) for row in others} ^ {title(case.key) for case in chosen} if others else set()
    if differing:
        raise ValueError(f"run all policies: only the earlier rows or only today's cases have {sorted(differing)}")
    return others


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Case by case, and the policies of a case in the order of POLICIES."""
    return [row for group in groups(rows) for row in sorted(group, key=lambda row: POLICIES.index(row["policy"]))]


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each case, all policies side by side."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["fleet"], row["workers"], row["load"]), []).append(row)
    return list(found.values())


def shortfall(group: list[Row], figure: str, row: Row) -> float:
    """How much worse than the best policy of its case a row is: 0 is the best, 0.1 is 10 % worse."""
    values = [other[figure] for other in group]
    best: float = max(values) if FIGURES[figure] else min(values)
    if not best:
        return 0.0
    worse: float = 1 - row[figure] / best if FIGURES[figure] else row[figure] / best - 1
    return worse


def title(row: Row) -> str:
    fleet = "" if row["fleet"] == "equal" else f", {row['fleet']}"
    return f"{row['workload']}, {row['workers']} workers{fleet}, {row['load']}"


def text(figure: str, value: float) -> str:
    return f"{value:{FORMATS[figure]}}"


def show(rows: list[Row], console: Console) -> None:
    """A table of each case; a figure within 2 % of its best is bold."""
    for group in groups(rows):
        table = Table(title=title(group[0]), title_justify="left")
        for column in ("policy", *HEADS):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for row in group:
            marked = (_marked(group, name, row, "[bold]", "[/bold]") for name in FIGURES)
            table.add_row(row["policy"], *marked)
        console.print(table)


def _marked(group: list[Row], figure: str, row: Row, before: str, after: str) -> str:
    shown = text(figure, row[figure])
    return f"{before}{shown}{after}" if shortfall(group, figure, row) <= WITHIN else shown


def markdown(rows: list[Row], measured: dict[str, str]) -> str:
    """Each case in a table: a row a policy, figures within 2 % of the best of the case bold. `measured`: when each
    policy ran."""
    lines = ["# Placement policies compared", "", "Written by `python -m bench.run --part placement`.", ""]
    lines += [*_days(measured), "", *summary(rows), "", "## Averages over the cases", "", *averages(rows)]
    for group in groups(rows):
        lines += ["", f"## {title(group[0])}", "", f"| policy | {' | '.join(HEADS)} |", f"|---|{'---:|' * len(HEADS)}"]
        for row in group:
            shown = " | ".join(_marked(group, name, row, "**", "**") for name in FIGURES)
            lines.append(f"| {row['policy']} | {shown} |")
    return "\n".join(lines) + "\n"


def _days(measured: dict[str, str]) -> list[str]:
    days = sorted(set(measured.values()))
    if len(days) == 1:
        return [f"All policies ran on {days[0]}."]
    ran = (f"- {day}: {', '.join(name for name in measured if measured[name] == day)}" for day in days)
    return ["The policies ran on different days, each with the code of its day (runs are deterministic):", "", *ran]


def summary(rows: list[Row]) -> list[str]:
    """For each policy: in how many cases a figure is within 2 % of the best, and how far it falls short at worst."""
    lines = [f"| policy | {' | '.join(HEADS)} |", f"|---|{'---:|' * len(HEADS)}"]
    cases = groups(rows)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = []
        for figure in FIGURES:
            short = [shortfall(group, figure, row) for group in cases for row in group if row["policy"] == policy]
            near = sum(worse <= WITHIN for worse in short)
            cells.append(f"{near} of {len(short)}, {max(short):.0%}")
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def averages(rows: list[Row]) -> list[str]:
    """For each policy and figure the geometric mean over all cases, so that large figures do not count more than small
    ones. The cached share may be 0, so it has the arithmetic mean. Figures within 2 % of the best policy are bold."""
    lines = [f"| policy | {' | '.join(HEADS)} |", f"|---|{'---:|' * len(HEADS)}"]
    means: list[Row] = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        mean = {name: statistics.geometric_mean(row[name] for row in own) for name in FIGURES if name != "cached_share"}
        mean["cached_share"] = statistics.mean(row["cached_share"] for row in own)
        means.append({"policy": policy, **mean})
    for row in means:
        shown = " | ".join(_marked(means, name, row, "**", "**") for name in FIGURES)
        lines.append(f"| {row['policy']} | {shown} |")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """How far each policy is from the best one of each case. Needs matplotlib:
    `pip install -c constraints.txt -e '.[bench]'`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.lines import Line2D

    policies = list(dict.fromkeys(row["policy"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, panels = pyplot.subplots(1, 4, figsize=(13, 4.6), dpi=110, layout="constrained", sharey=True)
    colors = {name: colormaps["tab10"](i) for i, name in enumerate(workloads)}
    shown = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "cached_share")
    for axes, name in zip(panels, shown, strict=True):
        for group in groups(rows):
            for row in group:
                times = 1 / (1 - shortfall(group, name, row)) if FIGURES[name] else 1 + shortfall(group, name, row)
                offset = (workloads.index(row["workload"]) - len(workloads) / 2 + 0.5) * 0.12
                color = colors[row["workload"]]
                axes.plot(times, policies.index(row["policy"]) + offset, "o", ms=4, color=color, alpha=0.75)
        axes.axvspan(1, 1 + WITHIN, color="grey", alpha=0.25)
        axes.set(xscale="log")
        axes.set_title(HEADS[list(FIGURES).index(name)], fontsize=10)
        ticks = [1, 1.5, 2, 3, 5, 10, 20]
        most = axes.get_xlim()[1]
        axes.set_xticks([tick for tick in ticks if tick <= most], [f"{tick:g}" for tick in ticks if tick <= most])
        axes.minorticks_off()
        axes.grid(axis="x", alpha=0.3)
    figure.supxlabel("times worse than the best policy of the case", fontsize=10)
    panels[0].set_yticks(range(len(policies)), policies)
    panels[0].invert_yaxis()
    marks = [Line2D([], [], marker="o", ls="", color=colors[name], label=name) for name in workloads]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(workloads), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
