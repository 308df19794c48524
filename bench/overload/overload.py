"""Measures the whole server under overload and under hostile clients: `--part overload`.

The real services on this machine serve the demo model. Each kind of clients runs in a process of its own
(bench.overload.clients). The cases:
- `peak`: as many requests at once as the slots and half of the queue hold. The clients of `10x` use more CPU time than
  those of `peak`. Another process burns the difference, so that the server has the same CPU time left in both cases.
- `10x`, in turns with `peak`: clients send ten times the request rate that the peak has just served. They do not retry.
- `10x, come back`: ten times as many clients as slots and queue positions. Each retries after its retry-after time.
- normal clients beside readers that do not read, request heads that come byte by byte, connections that send nothing,
  and clients that disconnect after their request.

The report also has the event-loop lag of the gateway (its own metric) and of the clients, because the latencies that
clients see include both, and the wait for the shared cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.overload.clients import MEAN_OUTPUT_TOKENS
from services.runtime.service import raise_file_limit
from tests.support.stack import Stack

SLOTS, QUEUE = 32, 64
OVERLOAD = 10
SECONDS = 12.0
# The host of a virtual machine may give its cores to others, so its speed may halve from one minute to the next.
# So the turns are short. They end after TURNS quiet turns, in which at most QUIET_STOLEN_CORES were stolen, or after
# MOST_TURNS turns of any kind.
TURNS, MOST_TURNS, TURN_SECONDS = 8, 24, 6.0
QUIET_STOLEN_CORES = 0.1
FLOOD_CORES = 0.08  # the first guess of how many more cores the clients of `10x` take than those of `peak`
LONGEST_S = 90.0  # limit until all refused clients have come back and have been served
IDLE_CONNECTIONS, SLOW_HEADS, STALLED_READERS = 10_000, 500, 8
STORM_PER_S = 1000
_SAMPLE_S = 0.2
_LAG = "paceline_gateway_event_loop_lag_seconds_bucket"


class Role:
    """A process of clients, which starts at once. The context begins when the clients are ready, and kills the process
    at its end. `result` waits for the clients' result."""

    def __init__(self, stack: Stack, role: str, number: float, seconds: float = 0.0) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.overload.clients",
            role,
            str(stack.http_port),
            str(number),
            str(seconds),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def cpu_s(self) -> float:
        """User and system CPU seconds of the process."""
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def __enter__(self) -> Role:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("clients did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def result(self, *, end: bool = True) -> dict[str, Any]:
        """Waits for the end of the clients and returns their result. `end` asks them to end now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if end:
            self._process.stdin.close()
        saw: dict[str, Any] = json.loads(self._process.stdout.readline())
        return saw


class Most(threading.Thread):
    """Samples a value five times a second while the context lasts, and keeps the largest."""

    def __init__(self, look: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self.value = 0
        self._look = look
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.value = max(self.value, self._look())

    def __enter__(self) -> Most:
        self.value = self._look()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else None


def bucket_percentile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """The upper edge, in ms, of the Prometheus histogram bucket that has this percentile."""
    grown = {edge: after[edge] - before.get(edge, 0.0) for edge in sorted(after)}
    total = max(grown.values(), default=0.0)
    return next((round(1000 * edge, 1) for edge, count in grown.items() if total and count >= share * total), None)


def stolen_by_host_s() -> float:
    """CPU seconds of all cores that the host has taken since boot; 0 where the system does not report them."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class Measurement:
    """Measures a running stack."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.rows: list[dict[str, Any]] = []
        self._processes = {name: psutil.Process(process.pid) for name, process in stack.processes.items()}

    def resident_mib(self) -> dict[str, int]:
        return {name: process.memory_info().rss >> 20 for name, process in self._processes.items()}

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def waited_s(self) -> float:
        """How long the gateway's event loop was ready to run and had no core (Linux's schedstat)."""
        pid = self.stack.processes["gateway"].pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9

    def gateway(self) -> list[tuple[str, float]]:
        """The gateway's series with their values."""
        with urllib.request.urlopen(f"{self.stack.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return [(name, float(value)) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")]

    @staticmethod
    def lag(series: list[tuple[str, float]]) -> dict[float, float]:
        return {float(name.split('"')[1]): value for name, value in series if name.startswith(_LAG)}

    def rest(self) -> None:
        self.stack.wait_metric("paceline_scheduler_num_requests_running", 0)
        self.stack.wait_metric("paceline_scheduler_kv_cache_usage_ratio", 0)

    def row(self, name: str, role: str, number: float, seconds: float = SECONDS) -> dict[str, Any]:
        """The figures of these clients, while other clients ask /health."""
        before_mib = self.resident_mib()["gateway"]
        with Role(self.stack, role, number, seconds) as clients, Role(self.stack, "probe", 0) as probe:
            series = dict(self.gateway())
            cpu_s, waited_s = self.cpu_s() | {"clients": clients.cpu_s() + probe.cpu_s()}, self.waited_s()
            stolen_s = stolen_by_host_s()
            with Most(lambda: self.resident_mib()["gateway"]) as most_mib:
                saw = clients.result(end=False)
            cpu_after_s, waited_s = self.cpu_s(), self.waited_s() - waited_s
            stolen_s = stolen_by_host_s() - stolen_s
            cpu_after_s["clients"] = clients.cpu_s() + probe.cpu_s()  # both processes still run
            after = dict(self.gateway())
            health = probe.result()
        lags = self.lag(list(series.items())), self.lag(list(after.items()))
        spent_s = {process: cpu_after_s[process] - cpu_s[process] for process in cpu_s}
        servers_s = sum(spent_s[name] for name in self._processes)
        returns = saw["returns"]
        self.rows.append(
            {
                "load": name,
                "seconds": round(saw["seconds"], 1),
                "tokens_per_s": round(saw["tokens"] / saw["seconds"], 1),
                "served": len(saw["served_ms"]),
                "served_p50_ms": percentile(saw["served_ms"], 0.5),
                "refused": len(saw["refused_ms"]),
                "refused_p50_ms": percentile(saw["refused_ms"], 0.5),
                "refused_p99_ms": percentile(saw["refused_ms"], 0.99),
                "refused_max_ms": percentile(saw["refused_ms"], 1.0),
                "retry_after_s": [min(saw["retry_after_s"]), max(saw["retry_after_s"])]
                if saw["retry_after_s"]
                else None,
                "users_by_returns": {times: returns.count(times) for times in sorted(set(returns))},
                "other_statuses": saw["others"],
                "health_p50_ms": percentile(health["served_ms"], 0.5),
                "health_p99_ms": percentile(health["served_ms"], 0.99),
                "health_max_ms": percentile(health["served_ms"], 1.0),
                "health_not_200": sum(health["others"].values()),
                "gateway_lag_p50_ms": bucket_percentile_ms(*lags, 0.5),
                "gateway_lag_p99_ms": bucket_percentile_ms(*lags, 0.99),
                "client_lag_p99_ms": percentile(saw["lag_ms"], 0.99),
                # The clients take CPU time from the servers. So the row also has the tokens per CPU second of
                # the servers, which includes the cost of refusals.
                "cpu_s": {process: round(seconds, 2) for process, seconds in spent_s.items()},
                "cores_busy": round(sum(spent_s.values()) / saw["seconds"], 2),
                "tokens_per_server_cpu_s": round(saw["tokens"] / servers_s, 1) if servers_s else None,
                "gateway_waited_for_core_s": round(waited_s, 1),
                "stolen_cores": round(stolen_s / saw["seconds"], 2),
                "gateway_mib": [before_mib, most_mib.value],
                "dropped": after["paceline_gateway_gone_requests_total"]
                - series["paceline_gateway_gone_requests_total"],
            }
        )
        return self.rows[-1]

    def beside(self, name: str, role: str, number: float) -> None:
        """The throughput of SLOTS clients beside other clients. The memory figures include the effect of both."""
        before = self.resident_mib()["gateway"]
        with Role(self.stack, role, number) as others:
            row = self.row(name, "closed", SLOTS)
            row["gateway_mib"][0] = before
            row["others"] = {key: value for key, value in others.result().items() if key in ("started", "others")}
        self.rest()

    def peak(self, flood_cores: float) -> dict[str, Any]:
        """The peak, beside a process that burns `flood_cores`: how many more cores the clients of `10x` use than those
        of `peak`. Clients are no part of the server, but share its cores."""
        with Role(self.stack, "burn", flood_cores):
            row = self.row("peak", "closed", SLOTS + QUEUE // 2, TURN_SECONDS)
        row["burnt_cores"] = flood_cores
        self.rest()
        return row

    def turns(self) -> None:
        """Alternates turns at the peak with turns at OVERLOAD times the served rate of the peak."""
        before, num_quiet = self.peak(FLOOD_CORES), 0
        for _ in range(MOST_TURNS):
            per_s = OVERLOAD * before["served"] / before["seconds"]
            row = self.row(f"{OVERLOAD}x", "open", per_s, TURN_SECONDS)
            self.rest()
            spent_s = row["cpu_s"]["clients"] - before["cpu_s"]["clients"]
            after = self.peak(round(max(spent_s, 0.0) / TURN_SECONDS, 3))
            row["offered_per_s"] = round(per_s, 1)
            # Relative to the mean of the peaks before and after it, because the machine's speed changes.
            row["of_peak"] = round(2 * row["tokens_per_s"] / (before["tokens_per_s"] + after["tokens_per_s"]), 3)
            row["quiet"] = max(part["stolen_cores"] for part in (before, row, after)) <= QUIET_STOLEN_CORES
            num_quiet += row["quiet"]
            if num_quiet == TURNS:
                return
            before = after

    def run(self) -> None:
        self.row("warm", "closed", SLOTS, 2.0)
        self.rows.clear()
        self.turns()
        self.row(f"{OVERLOAD}x, come back", "come_back", OVERLOAD * (SLOTS + QUEUE), LONGEST_S)
        self.rest()
        self.row(f"{SLOTS} clients", "closed", SLOTS)
        self.rest()
        self.beside(f"beside {STALLED_READERS} that do not read", "stalled", STALLED_READERS)
        self.beside(f"beside {SLOW_HEADS} slow heads", "heads", SLOW_HEADS)
        self.beside(f"beside {IDLE_CONNECTIONS} idle", "idle", IDLE_CONNECTIONS)
        self.beside(f"beside {STORM_PER_S}/s start and go", "storm", STORM_PER_S)
        self.row(f"{SLOTS} clients, after it all", "closed", SLOTS)
        self.rest()


def overload() -> list[dict[str, Any]]:
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        stack.worker_flags = ["--threads", "1", "--max-num-seqs", str(SLOTS), "--log-level", "warning"]
        stack.scheduler_flags = ["--max-queued-requests", str(QUEUE), "--max-num-seqs", str(SLOTS)]
        # All clients have one address.
        stack.gateway_flags = ["--log-level", "warning", "--max-connections-per-client", "16384"]
        try:
            measurement = Measurement(stack.up())
            measurement.run()
            return measurement.rows
        finally:
            stack.down()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        title=f"Overload: demo model, {SLOTS} slots, a queue of {QUEUE}, {MEAN_OUTPUT_TOKENS} tokens each or so"
    )
    for column in (
        "load",
        "tokens/s",
        "of the peak",
        "per CPU s of the server",
        "served",
        "429",
        "429 p50/p99 ms",
        "Retry-After s",
        "came back: served after one return",
        "/health p50/p99 ms",
        "lag p99 ms: gateway, clients",
        "stolen cores",
        "gateway MiB: before, most",
        "dropped",
    ):
        table.add_column(column, justify="left" if column == "load" else "right")
    for row in rows:
        span, users = row["retry_after_s"], row["users_by_returns"]
        came_back = sum(count for times, count in users.items() if times)
        table.add_row(
            row["load"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['of_peak']:.2f}" if "of_peak" in row else "",
            f"{row['tokens_per_server_cpu_s']:,.0f}",
            str(row["served"]),
            str(row["refused"]),
            f"{row['refused_p50_ms']} / {row['refused_p99_ms']}" if row["refused"] else "",
            f"{span[0]} to {span[1]}" if span else "",
            f"{came_back}: {users.get(1, 0)}" if came_back else "",
            f"{row['health_p50_ms']} / {row['health_p99_ms']}",
            f"{row['gateway_lag_p99_ms']}, {row['client_lag_p99_ms']}",
            f"{row['stolen_cores']:.2f}",
            f"{row['gateway_mib'][0]}, {row['gateway_mib'][1]}",
            f"{row['dropped']:.0f}" if row["dropped"] else "",
        )
    console.print(table)
    turns = [row for row in rows if "of_peak" in row]
    for name, ratios in (
        ("all", [row["of_peak"] for row in turns]),
        (f"those with at most {QUIET_STOLEN_CORES} cores stolen", [row["of_peak"] for row in turns if row["quiet"]]),
    ):
        if ratios:
            span = f"median {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            console.print(f"{OVERLOAD}x, of the peak: {span} of {len(ratios)} turns, {name}")
