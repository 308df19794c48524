"""Clients of bench.overload.overload, each role a process: `python -m bench.overload.clients ROLE PORT NUMBER SECONDS`.

Prints `ready`, and in the end what it saw, as JSON. A time is measured from the moment at which the request was written
until the answer has arrived; for the role `probe`, the time to connect is included. `lag` is how late this process
itself was; the times include this lag. With 0 seconds a role goes on until its input ends, except `come_back`, which
needs a number of seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from services.runtime.service import raise_file_limit

PROMPT_TOKENS, MEAN_OUTPUT_TOKENS = 16, 32
# Warm-up in seconds. After it, the first requests are served, and the later ones are spread over time.
WARM_S = 2.0
# Made in advance and chosen at random, because making them would take CPU time from the server on the same cores.
_NUM_REQUESTS = 512
_LAG_EVERY_S = 0.02
_PROBE_EVERY_S = 0.05
_BURN_EVERY_S = 0.002
_GO_AFTER_S = 0.02
HOST = "127.0.0.1"


@dataclass
class Tally:
    """What clients saw."""

    seconds: float = 0.0
    tokens: int = 0
    started: int = 0
    served_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)  # how often each came back until it was served
    others: dict[int, int] = field(default_factory=dict)  # by status; 0: no answer
    lag_ms: list[float] = field(default_factory=list)

    def count(self, answer: Answer, tokens: int) -> None:
        if answer.status == 200:
            self.tokens += tokens
            self.served_ms.append(answer.took_ms)
        elif answer.status == 429:
            self.refused_ms.append(answer.took_ms)
            self.retry_after_s.append(answer.retry_after_s)
        else:
            self.others[answer.status] = self.others.get(answer.status, 0) + 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request."""

    status: int  # 0: there is none
    retry_after_s: int
    took_ms: float


def settle(answered: asyncio.Future[Answer]) -> Callable[[Answer], None]:
    """A callback that gives `answered` its result, unless no task waits for it any more."""

    def give(answer: Answer) -> None:
        if not answered.done():
            answered.set_result(answer)

    return give


def completion(rng: random.Random, max_tokens: int, **options: Any) -> bytes:
    fields = {
        "prompt": [rng.randrange(8, 900) for _ in range(PROMPT_TOKENS)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }
    body = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Connection(asyncio.Protocol):
    """One request at a time, with an answer that is no stream."""

    def __init__(self) -> None:
        self._data = b""
        self._length = 0  # of head and body, once it is known
        self._on_answer: Callable[[Answer], object] | None = None
        self._written_s = 0.0
        self.transport: Any = None  # uvloop's is no asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: bytes, on_answer: Callable[[Answer], object]) -> None:
        """Uses no task and no future: they would take more CPU time than the request, on shared cores."""
        self._data, self._length = b"", 0
        self._on_answer = on_answer
        self._written_s = time.perf_counter()
        if self.transport.is_closing():
            self._done(0, 0)
        else:
            self.transport.write(request)

    async def ask(self, request: bytes) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.send(request, settle(answered))
        return await answered

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._length and (end := self._data.find(b"\r\n\r\n")) >= 0:
            self._length = end + 4 + int(self._header(b"content-length"))
        if self._length and len(self._data) >= self._length:
            self._done(int(self._data[9:12]), int(self._header(b"retry-after") or 0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._done(0, 0)

    def _header(self, name: bytes) -> bytes:
        return self._data.lower().partition(b"\r\n%s: " % name)[2].partition(b"\r")[0]

    def _done(self, status: int, retry_after_s: int) -> None:
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(Answer(status, retry_after_s, round(1000 * (time.perf_counter() - self._written_s), 3)))


class Clients:
    """All clients of one process."""

    def __init__(self, port: int, number: float, seconds: float) -> None:
        self.port, self.number, self.seconds = port, number, seconds
        self.tally = Tally()
        self.rng = random.Random(number)
        half = MEAN_OUTPUT_TOKENS // 2
        lengths = [self.rng.randrange(half, 3 * half) for _ in range(_NUM_REQUESTS)]
        self._requests = [(completion(self.rng, length), length) for length in lengths]
        self._free: list[Connection] = []
        self._ended = asyncio.Event()

    async def run(self, role: str) -> None:
        lagging = asyncio.create_task(self._watch_lag())
        await self.ROLES[role](self)
        lagging.cancel()
        print(json.dumps(asdict(self.tally)), flush=True)
        sys.stdin.read()  # bench.overload reads the CPU time of this process before it closes the input

    def ready(self) -> None:
        print("ready", flush=True)
        if not self.seconds:
            asyncio.get_running_loop().add_reader(sys.stdin, self._ended.set)
        else:
            asyncio.get_running_loop().call_later(self.seconds, self._ended.set)

    async def ask(self) -> Answer:
        """Sends a request on a kept-alive connection that other users also use, as a proxy in front would do."""
        connection = self._free.pop() if self._free else await self._connect()
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._send(connection, settle(answered))
        return await answered

    def _send(self, connection: Connection, then: Callable[[Answer], object] = lambda answer: None) -> None:
        request, length = self._requests[int(self.rng.random() * _NUM_REQUESTS)]

        def count(answer: Answer) -> None:
            if answer.status:
                self._free.append(connection)
            self.tally.count(answer, length)
            then(answer)

        self.tally.started += 1
        connection.send(request, count)

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, self.port)
        return connection

    async def _watch_lag(self) -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(_LAG_EVERY_S)
            self.tally.lag_ms.append(round(1000 * (time.perf_counter() - began_s - _LAG_EVERY_S), 3))

    async def closed(self) -> None:
        """Runs this many users. Each sends the next request as soon as it has its answer."""

        async def user() -> None:
            while True:
                await self.ask()

        tasks = [asyncio.create_task(user()) for _ in range(int(self.number))]
        await self._measure(tasks)

    async def open(self) -> None:
        """Sends a fixed number of requests per second, also while earlier ones wait."""

        async def by_the_clock() -> None:
            began_s, sent, tasks = time.perf_counter(), 0, set[asyncio.Task[Answer]]()
            while True:
                for _ in range(int((time.perf_counter() - began_s) * self.number) - sent):
                    sent += 1
                    if self._free:
                        self._send(self._free.pop())
                        continue
                    task = asyncio.create_task(self.ask())
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(0.002)

        await self._measure([asyncio.create_task(by_the_clock())])

    async def _measure(self, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.sleep(WARM_S)
        self.tally = Tally()
        self.ready()
        began_s = time.perf_counter()
        await self._ended.wait()
        self.tally.seconds = time.perf_counter() - began_s
        # run() prints the tally before the event loop reads another answer. So a later answer is not counted, but
        # `started` includes its request.
        for task in tasks:
            task.cancel()

    async def come_back(self) -> None:
        """Starts many users at the same moment, with one request each. A refused user waits for as long as the 429
        says."""

        async def user() -> None:
            returns = 0
            while (answer := await self.ask()).status == 429:
                await asyncio.sleep(answer.retry_after_s)
                returns += 1
            self.tally.returns.append(returns)

        self._free = [await self._connect() for _ in range(int(self.number))]
        self.ready()
        began_s = time.perf_counter()
        tasks = [asyncio.create_task(user()) for _ in range(int(self.number))]
        _, late = await asyncio.wait(tasks, timeout=self.seconds)
        self.tally.seconds = time.perf_counter() - began_s
        for task in late:
            task.cancel()

    async def storm(self) -> None:
        """Starts this many clients per second, which connect, request a stream and leave."""
        tasks = set[asyncio.Task[None]]()
        request = completion(self.rng, 4 * MEAN_OUTPUT_TOKENS, stream=True)

        async def start_and_go() -> None:
            try:
                connection = await self._connect()
            except OSError:
                self.tally.others[0] = self.tally.others.get(0, 0) + 1
                return
            connection.transport.write(request)
            await asyncio.sleep(_GO_AFTER_S)
            connection.transport.abort()

        self.ready()
        began_s = time.perf_counter()
        while not self._ended.is_set():
            for _ in range(int((time.perf_counter() - began_s) * self.number) - self.tally.started):
                self.tally.started += 1
                task = asyncio.create_task(start_and_go())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.002)
        self.tally.seconds = time.perf_counter() - began_s

    async def stalled(self) -> None:
        """Streams that no client reads, of a few MB of events, which is more than sockets hold."""
        loop, request = asyncio.get_running_loop(), completion(self.rng, 2000, stream=True, logprobs=20)
        for _ in range(int(self.number)):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, (HOST, self.port))
            await loop.sock_sendall(sock, request)
        self.ready()
        await self._ended.wait()

    async def heads(self) -> None:
        """Sends the heads of requests, one byte per second."""
        connections = await self._connections()
        self.ready()
        for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 1000:
            for connection in connections:
                connection.transport.write(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ended.wait()
                    return

    async def idle(self) -> None:
        """Connections that send no request."""
        _ = await self._connections()
        self.ready()
        await self._ended.wait()

    async def _connections(self) -> list[Connection]:
        made: list[Connection] = []
        while len(made) < self.number:
            made += await asyncio.gather(*(self._connect() for _ in range(min(100, int(self.number) - len(made)))))
        return made

    async def probe(self) -> None:
        """/health again and again, each time on a new connection."""
        self.ready()
        while not self._ended.is_set():
            began_s = time.perf_counter()
            connection = await self._connect()
            answer = await connection.ask(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            took_ms = 1000 * (time.perf_counter() - began_s)  # with the time to connect
            self.tally.count(Answer(answer.status, 0, round(took_ms, 3)), 0)
            connection.transport.close()
            await asyncio.sleep(_PROBE_EVERY_S)

    async def burn(self) -> None:
        """Uses the CPU time of this many cores, in bursts about as short as those of the role `open`."""
        self.ready()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        while not self._ended.is_set():
            while time.process_time() - began_cpu_s < self.number * (time.perf_counter() - began_s):
                pass
            await asyncio.sleep(_BURN_EVERY_S)

    ROLES: dict[str, Callable[[Clients], Awaitable[None]]] = {  # noqa: RUF012 - never changed
        role.__name__: role for role in (closed, open, come_back, storm, stalled, heads, idle, probe, burn)
    }


def main() -> None:
    role, port, number, seconds = sys.argv[1:]
    raise_file_limit()

    async def run() -> None:
        await Clients(int(port), float(number), float(seconds)).run(role)

    uvloop.run(run())


if __name__ == "__main__":
    main()
