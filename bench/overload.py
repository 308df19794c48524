"""The whole server under more than it can do, and under clients that mean it ill: `--part overload`.

The demo model behind the real services on this machine, the clients in this process. At first what the server does at
its best (`peak`): as many requests at once as have a place. Then ten times as many requests as it can serve, by the
clock, from clients that never come again (`10x`), and from such as come again when they were told to (`10x, come
back`). Then readers that do not read, heads of requests that come byte by byte, connections that ask nothing, and
clients that go away as soon as they have asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from services.runtime.service import raise_file_limit
from tests.support.stack import Stack

PROMPT_TOKENS, OUTPUT_TOKENS = 16, 128
SEATS, QUEUE = 32, 64
OVERLOAD = 10
SECONDS = 8.0
IDLE_CONNECTIONS, SLOW_HEADS, STALLED_READERS = 10_000, 500, 8
STORM_PER_S, STORM_S = 1000, 5.0


@dataclass
class Tally:
    """What clients saw, in seconds."""

    tokens: int = 0
    served_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    returned: int = 0  # that came back when told to ...
    let_in: int = 0  # ... and were served
    others: dict[int, int] = field(default_factory=dict)  # by status; 0: no answer

    def count(self, status: int, took_s: float, retry_after: int) -> None:
        if status == 200:
            self.tokens += OUTPUT_TOKENS
            self.served_s.append(took_s)
        elif status == 429:
            self.refused_s.append(took_s)
            self.retry_after_s.append(retry_after)
        else:
            self.others[status] = self.others.get(status, 0) + 1


def percentile_ms(values_s: list[float], share: float) -> float | None:
    ordered = sorted(values_s)
    return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else None


def completion(rng: random.Random, **options: Any) -> bytes:
    fields = {
        "prompt": [rng.randrange(8, 900) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }
    body = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Client:
    """Connections that are kept and used again, as a proxy in front would do."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes) -> tuple[int, int]:
        """Status and Retry-After of an answer that is no stream; 0 if there is none."""
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r")[0]))
        except (OSError, asyncio.IncompleteReadError):
            writer.close()
            return 0, 0
        self._free.append((reader, writer))
        return int(head.split()[1]), int(head.partition(b"retry-after: ")[2].split(b"\r")[0] or 0)

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def timed(client: Client, tally: Tally, request: bytes) -> tuple[int, int]:
    began_s = time.perf_counter()
    status, retry_after = await client.ask(request)
    tally.count(status, time.perf_counter() - began_s, retry_after)
    return status, retry_after


async def for_a_while(seconds: float, users: list[Callable[[], Awaitable[None]]]) -> None:
    """All users, each again and again until the time is over; what is on its way then is given up."""

    async def use(user: Callable[[], Awaitable[None]]) -> None:
        while True:
            await user()

    tasks = [asyncio.create_task(use(user)) for user in users]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


class Measurement:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.rng = random.Random(0)
        self.rows: list[dict[str, Any]] = []
        self.peak_tokens_per_s = 0.0

    def resident_mib(self) -> dict[str, int]:
        pids = {name: process.pid for name, process in self.stack.processes.items()}
        return {name: psutil.Process(pid).memory_info().rss >> 20 for name, pid in pids.items()}

    async def rest(self) -> None:
        await asyncio.to_thread(self.stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
        await asyncio.to_thread(self.stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)

    async def row(self, name: str, work: Awaitable[Tally], **more: Any) -> Tally:
        """Do it while asking /health ten times a second, and note what came of it."""
        before, health = self.resident_mib(), Tally()
        client = Client(self.stack.http_port)

        async def probe() -> None:
            while True:
                began_s = time.perf_counter()
                status, _ = await client.ask(HEALTH)
                health.others[status] = health.others.get(status, 0) + 1
                health.served_s.append(time.perf_counter() - began_s)
                await asyncio.sleep(0.1)

        probing, began_s = asyncio.create_task(probe()), time.perf_counter()
        tally = await work
        took_s = time.perf_counter() - began_s
        probing.cancel()
        after = self.resident_mib()
        await self.rest()
        client.close()
        self.rows.append(
            {
                "load": name,
                "seconds": round(took_s, 1),
                "served": len(tally.served_s),
                "tokens_per_s": round(tally.tokens / took_s, 1),
                "refused": len(tally.refused_s),
                "refused_p50_ms": percentile_ms(tally.refused_s, 0.5),
                "refused_p99_ms": percentile_ms(tally.refused_s, 0.99),
                "retry_after_s": [min(tally.retry_after_s), max(tally.retry_after_s)] if tally.retry_after_s else None,
                "came_back": tally.returned,
                "then_served": tally.let_in,
                "other_statuses": tally.others,
                "health_p50_ms": percentile_ms(health.served_s, 0.5),
                "health_p99_ms": percentile_ms(health.served_s, 0.99),
                "health_not_200": sum(health.others.values()) - health.others.get(200, 0),
                "grown_mib": {name: after[name] - before[name] for name in after},
                **more,
            }
        )
        return tally

    async def closed_loop(self, users: int, seconds: float = SECONDS) -> Tally:
        client, tally = Client(self.stack.http_port), Tally()

        async def user() -> None:
            await timed(client, tally, completion(self.rng))

        await for_a_while(seconds, [user] * users)
        client.close()
        return tally

    async def open_loop(self, per_s: float) -> Tally:
        """Requests by the clock, whatever becomes of those before."""
        client, tally, tasks = Client(self.stack.http_port), Tally(), set()
        began_s, sent = time.perf_counter(), 0
        while (now_s := time.perf_counter() - began_s) < SECONDS:
            for _ in range(int(now_s * per_s) - sent):
                sent += 1
                task = asyncio.create_task(timed(client, tally, completion(self.rng)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.005)
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        return tally

    async def come_back(self, users: int) -> Tally:
        """Clients with one request at a time that wait for as long as they are told to."""
        client, tally = Client(self.stack.http_port), Tally()

        async def user() -> None:
            request, returns = completion(self.rng), False
            while True:
                status, retry_after = await timed(client, tally, request)
                tally.returned += returns
                tally.let_in += returns and status == 200
                if status != 429:
                    return
                await asyncio.sleep(retry_after)
                returns = True

        await for_a_while(SECONDS, [user] * users)
        client.close()
        return tally

    async def stalled(self) -> Tally:
        """Others' tokens beside streams that nobody reads."""
        # A few MB of events, which is more than sockets hold.
        writers, wanted = [], completion(self.rng, stream=True, max_tokens=2000, logprobs=20)
        for _ in range(STALLED_READERS):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.stack.http_port))
            await asyncio.get_running_loop().sock_sendall(sock, wanted)
            writers.append(sock)
        tally = await self.closed_loop(SEATS)
        for sock in writers:
            sock.close()
        return tally

    async def connections(self, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        made = []
        for _ in range(0, count, 100):
            made += await asyncio.gather(
                *(asyncio.open_connection("127.0.0.1", self.stack.http_port) for _ in range(100))
            )
        return made

    async def slow_heads(self) -> Tally:
        """Served beside heads of which a byte comes each second."""
        open_ones = await self.connections(SLOW_HEADS)

        async def drip() -> None:
            for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 1000:
                for _, writer in open_ones:
                    with contextlib.suppress(OSError):
                        writer.write(bytes([byte]))
                await asyncio.sleep(1.0)

        dripping = asyncio.create_task(drip())
        tally = await self.closed_loop(SEATS)
        dripping.cancel()
        for _, writer in open_ones:
            writer.close()
        return tally

    async def idle(self) -> Tally:
        open_ones = await self.connections(IDLE_CONNECTIONS)
        tally = await self.closed_loop(SEATS)
        for _, writer in open_ones:
            writer.close()
        return tally

    async def cancel_storm(self) -> Tally:
        """Requests whose clients go away while they are served."""
        tally, started, tasks = Tally(), 0, set()

        async def start_and_go() -> None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.stack.http_port)
                writer.write(completion(self.rng, stream=True))
                await asyncio.sleep(0.02)
                writer.transport.abort()
            except OSError:
                tally.others[0] = tally.others.get(0, 0) + 1

        began_s = time.perf_counter()
        while (now_s := time.perf_counter() - began_s) < STORM_S:
            for _ in range(int(now_s * STORM_PER_S) - started):
                started += 1
                task = asyncio.create_task(start_and_go())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)
        tally.others[499] = started
        return tally

    async def run(self) -> None:
        await self.closed_loop(SEATS, 3.0)  # warm
        peak = await self.row("peak", self.closed_loop(SEATS + QUEUE // 2))
        per_s = len(peak.served_s) / SECONDS
        offered = {"offered_per_s": round(OVERLOAD * per_s, 1)}
        await self.row(f"{OVERLOAD}x", self.open_loop(OVERLOAD * per_s), **offered)
        users = OVERLOAD * (SEATS + QUEUE)
        await self.row(f"{OVERLOAD}x, come back", self.come_back(users), users=users)
        await self.row(f"{SEATS} clients", self.closed_loop(SEATS))
        await self.row(f"beside {STALLED_READERS} that do not read", self.stalled())
        await self.row(f"beside {SLOW_HEADS} slow heads", self.slow_heads())
        await self.row(f"beside {IDLE_CONNECTIONS} idle", self.idle())
        await self.row(f"{STORM_PER_S}/s start and go", self.cancel_storm())
        await self.row(f"{SEATS} clients, after it all", self.closed_loop(SEATS))


def overload() -> list[dict[str, Any]]:
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        stack.worker_flags = [
            "--threads",
            "1",
            "--max-num-seqs",
            str(SEATS),
            "--log-level",
            "warning",
        ]
        stack.scheduler_flags = ["--max-queued-requests", str(QUEUE), "--max-num-seqs", str(SEATS)]
        stack.gateway_flags = ["--log-level", "warning"]
        try:
            measurement = Measurement(stack.up())
            asyncio.run(measurement.run())
            return measurement.rows
        finally:
            stack.down()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Overload: demo model, {SEATS} seats, a queue of {QUEUE}, {OUTPUT_TOKENS} tokens each")
    for column in ("load", "tokens/s", "served", "429", "429 p50/p99 ms", "Retry-After s", "came back: served"):
        table.add_column(column, justify="left" if column == "load" else "right")
    table.add_column("/health p50/p99 ms", justify="right")
    table.add_column("grown MiB", justify="right")
    for row in rows:
        span = row["retry_after_s"]
        table.add_row(
            row["load"],
            f"{row['tokens_per_s']:,.0f}",
            str(row["served"]),
            str(row["refused"]),
            f"{row['refused_p50_ms']} / {row['refused_p99_ms']}" if row["refused"] else "",
            f"{span[0]} to {span[1]}" if span else "",
            f"{row['came_back']}: {row['then_served']}" if row["came_back"] else "",
            f"{row['health_p50_ms']} / {row['health_p99_ms']}",
            " ".join(f"{name[:5]} {grown}" for name, grown in row["grown_mib"].items() if grown),
        )
    console.print(table)
