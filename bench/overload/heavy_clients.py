"""What one client with very large requests, or very many connections, costs the others.

The real services on this machine serve the demo model. Three well-behaved clients stream short completions while a
process of its own attacks (`--attack KIND`). The report has:

- TTFT and ITL of the well-behaved clients, alternately with and without each attack;
- the gateway's resident memory before, during and after 80 gRPC calls of almost 16 MB;
- the response time for a client at another address during 17,000 idle connections;
- the time until 6,000 requests at the same moment get their 429.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import uvloop

from bench.overload.clients import Connection, completion
from bench.overload.overload import Most, percentile
from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.runtime.service import raise_file_limit
from tests.support.stack import Stack

HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
SECONDS, VICTIMS, OUTPUT_TOKENS, ATTACKERS = 6.0, 3, 48, 4
CALLS, CALL_BYTES = 80, 15_900_000
HALF_OPEN, AT_ONCE = 17_000, 6_000
REOPEN_S = 20.0  # after which a half-open connection that was closed is opened again
SETTLE_S = 5.0
MIB = 2**20


def filled(prefix: str, item: str, suffix: str, num_bytes: int) -> bytes:
    """A JSON text of about `num_bytes` bytes."""
    count = (num_bytes - len(prefix) - len(suffix)) // (len(item) + 1)
    return (prefix + ",".join([item] * count) + suffix).encode()


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each attack."""
    completions, chats = "/v1/completions", "/v1/chat/completions"
    unknown = '{"prompt":[5],"max_tokens":-1,"x":['
    message = '{"role":"user","content":"hi there"}'
    bias = ",".join(f'"{token}":1' for token in range(90_000))
    return {
        "objects in an unknown field, 10 MB": (completions, filled(unknown, "{}", "]}", 10 * MIB)),
        "objects in an unknown field, 1 MB": (completions, filled(unknown, "{}", "]}", MIB)),
        "token ids, 1 MB": (completions, filled('{"max_tokens":-1,"prompt":[', "7", "]}", MIB)),
        "logit_bias, 1 MB": (completions, f'{{"prompt":[5],"max_tokens":-1,"logit_bias":{{{bias}}}}}'.encode()),
        "detokenize 131,072 ids": ("/detokenize", filled('{"tokens":[', "7", "]}", 2 * 131_072 + 12)),
        "tokenize 30,000 characters": ("/tokenize", json.dumps({"prompt": "Hello, you. " * 2500}).encode()),
        "chat of 16,000 messages": (chats, f'{{"messages":[{",".join([message] * 16_000)}]}}'.encode()),
    }


# -- attackers: processes of their own


async def flood(port: int, kind: str) -> Counter[int]:
    """ATTACKERS connections that send this body again and again, until stdin ends; counts statuses."""
    path, body = bodies()[kind]
    request = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    statuses: Counter[int] = Counter()
    loop = asyncio.get_running_loop()

    async def attacker() -> None:
        while True:
            try:
                _, connection = await loop.create_connection(Connection, HOST, port)
                while answer := await connection.ask(request):
                    statuses[answer.status] += 1
                    if not answer.status:
                        break
            except OSError:
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(attacker()) for _ in range(ATTACKERS)]
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()
    return statuses


async def half_open(port: int, kind: str) -> Counter[int]:
    """Connections that send no request and are opened again some time after they are closed, until stdin ends."""
    opened: Counter[int] = Counter()
    loop = asyncio.get_running_loop()

    async def hold() -> None:
        while True:
            try:
                reader, _ = await asyncio.open_connection(HOST, port)
                opened[1] += 1
                await reader.read()
            except OSError:
                opened[0] += 1
            await asyncio.sleep(REOPEN_S)

    tasks = []
    for count in range(HALF_OPEN):
        tasks.append(asyncio.create_task(hold()))
        if count % 200 == 199:
            await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    return opened


async def calls(port: int, kind: str) -> Counter[int]:
    """CALLS gRPC calls at the same time, each over a connection of its own; counts status codes."""
    print("ready", flush=True)
    message = inference_pb2.GenerateRequest(text="x" * CALL_BYTES)
    codes: Counter[int] = Counter()

    async def call(index: int) -> None:
        options = [("grpc.max_send_message_length", 2**25), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"{HOST}:{port}", options=options) as channel:
            try:
                async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(message):
                    pass
                codes[0] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code().value[0]] += 1

    await asyncio.gather(*(call(index) for index in range(CALLS)))
    return codes


ATTACKS = {"half open": half_open, "calls": calls}


class Attack:
    """An attack in a process of its own. As a context manager it waits until the attack has begun."""

    def __init__(self, kind: str, port: int) -> None:
        self._command = [sys.executable, "-m", "bench.overload.heavy_clients", "--attack", kind, "--port", str(port)]

    def __enter__(self) -> Attack:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the attack did not start"
        return self

    def counts(self, *, end: bool = True) -> dict[str, int]:
        """The counts of the attack. `end`: end the attack first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if end:
            self._process.stdin.close()
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


# -- well-behaved clients, and what they measure


async def stream_for(url: str, seconds: float) -> dict[str, Any]:
    """VICTIMS clients that stream one completion after the other."""
    ttft_ms: list[float] = []
    itl_ms: list[float] = []
    failed: Counter[str] = Counter()
    end_s = time.perf_counter() + seconds

    async def victim(http: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": list(range(8, 24)), "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0, "seed": number}
        while time.perf_counter() < end_s:
            began_s, last_s = time.perf_counter(), 0.0
            try:
                async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now_s = time.perf_counter()
                        (itl_ms if last_s else ttft_ms).append(1000 * (now_s - (last_s or began_s)))
                        last_s = now_s
                    if answer.status_code != 200:
                        failed[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                failed[type(error).__name__] += 1
                await asyncio.sleep(0.05)

    async with httpx.AsyncClient(timeout=120) as http:
        await asyncio.gather(*(victim(http, number) for number in range(VICTIMS)))
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        "streams": len(ttft_ms),
        "tokens": len(ttft_ms) + len(itl_ms),
        "ttft_ms": {name: percentile(ttft_ms, share) for name, share in shares.items()},
        "itl_ms": {name: percentile(itl_ms, share) for name, share in shares.items()},
        "failed": dict(failed),
    }


def large_bodies(stack: Stack) -> list[dict[str, Any]]:
    asyncio.run(stream_for(stack.url, 2.0))  # warm
    rows = []
    for kind in bodies():
        alone = asyncio.run(stream_for(stack.url, SECONDS / 2))
        with Attack(kind, stack.http_port) as attack:
            time.sleep(2.0)  # the first large body starts a process in the gateway; this is not measured
            beside = asyncio.run(stream_for(stack.url, SECONDS))
            statuses = attack.counts()
        rows.append({"attack": kind, "alone": alone, "beside": beside, "statuses": statuses})
        print(kind, "ttft", alone["ttft_ms"], beside["ttft_ms"], "itl", alone["itl_ms"], beside["itl_ms"], statuses)
    return rows


def grpc_memory(stack: Stack) -> dict[str, Any]:
    """Resident MiB of the gateway."""
    process = psutil.Process(stack.processes["gateway"].pid)

    def resident_mib() -> int:
        return int(process.memory_info().rss / MIB)

    row: dict[str, Any] = {"calls": CALLS, "bytes": CALL_BYTES, "before_mib": resident_mib()}
    with Most(resident_mib) as most, Attack("calls", stack.grpc_port) as attack:
        row["codes"] = attack.counts(end=False)
    time.sleep(SETTLE_S)
    row |= {"most_mib": most.value, "after_mib": resident_mib()}
    print(row)
    return row


def many_connections(stack: Stack) -> dict[str, Any]:
    """Status and seconds, or the error, of ten /health calls from each of two addresses, during HALF_OPEN connections
    from the first."""

    def asks(source: str) -> list[Any]:
        saw: list[Any] = []
        for _ in range(10):
            began_s = time.perf_counter()
            try:
                with httpx.Client(transport=httpx.HTTPTransport(local_address=source), timeout=30) as http:
                    saw.append([http.get(f"{stack.url}/health").status_code, round(time.perf_counter() - began_s, 3)])
            except httpx.HTTPError as error:
                saw.append(type(error).__name__)
        return saw

    with Attack("half open", stack.http_port) as attack:
        row = {"half_open": HALF_OPEN, "same_address": asks(HOST), "other_address": asks(OTHER_HOST)}
        row["opened"] = attack.counts()
    print(row)
    return row


async def lean_refusals(port: int, *, connected: bool) -> list[tuple[int, float]]:
    """Status and milliseconds of AT_ONCE requests at the same moment. `connected`: over connections made before;
    otherwise over new ones."""
    loop, request = asyncio.get_running_loop(), completion(random.Random(1), 400)
    made: list[Connection] = []
    saw: list[tuple[int, float]] = []

    async def connect() -> Connection:
        _, connection = await loop.create_connection(Connection, HOST, port)
        return connection

    while connected and len(made) < AT_ONCE:
        made += await asyncio.gather(*(connect() for _ in range(200)))

    async def ask(index: int) -> None:
        asked_s = time.perf_counter()
        connection = made[index] if connected else await connect()
        answer = await connection.ask(request)
        saw.append((answer.status, 1000 * (time.perf_counter() - asked_s)))

    await finish([asyncio.create_task(ask(index)) for index in range(AT_ONCE)])
    return saw


async def httpx_refusals(url: str) -> list[tuple[int, float]]:
    """Measures refusals with httpx, the client that OpenAI's library uses."""
    saw: list[tuple[int, float]] = []
    body = {"prompt": list(range(8, 24)), "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:

        async def ask() -> None:
            asked_s = time.perf_counter()
            answer = await http.post(f"{url}/v1/completions", json=body)
            saw.append((answer.status_code, 1000 * (time.perf_counter() - asked_s)))

        await finish([asyncio.create_task(ask()) for _ in range(AT_ONCE)])
    return saw


async def finish(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks, timeout=90)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def refusals(stack: Stack) -> list[dict[str, Any]]:
    """How long AT_ONCE requests wait for their 429, and the CPU seconds of the gateway and of the clients meanwhile."""
    gateway, clients = psutil.Process(stack.processes["gateway"].pid), psutil.Process()
    rows = []
    ways: dict[str, Callable[[], list[tuple[int, float]]]] = {
        "connected before": lambda: uvloop.run(lean_refusals(stack.http_port, connected=True)),
        "new connections": lambda: uvloop.run(lean_refusals(stack.http_port, connected=False)),
        "new connections of httpx": lambda: uvloop.run(httpx_refusals(stack.url)),
    }
    for name, way in ways.items():
        before = [sum(process.cpu_times()[:2]) for process in (gateway, clients)]
        saw = way()
        after = [sum(process.cpu_times()[:2]) for process in (gateway, clients)]
        refused = [ms for status, ms in saw if status == 429]
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        rows.append(
            {
                "requests": AT_ONCE,
                "clients": name,
                "statuses": dict(Counter(str(status) for status, _ in saw)),
                "refused_ms": {share: percentile(refused, value) for share, value in shares.items()},
                "gateway_cpu_s": round(after[0] - before[0], 2),
                "clients_cpu_s": round(after[1] - before[1], 2),
            }
        )
        print(rows[-1])
        time.sleep(SETTLE_S)
    return rows


PARTS: dict[str, Callable[[Stack], Any]] = {
    "large_bodies": large_bodies,
    "grpc_memory": grpc_memory,
    "many_connections": many_connections,
    "refusals": refusals,
}


def measure(parts: list[str]) -> dict[str, Any]:
    report = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            stack = Stack(Path(folder))
            stack.worker_flags = ["--threads", "1", "--log-level", "warning"]
            stack.gateway_flags = ["--log-level", "warning"]
            if part == "grpc_memory":  # the default limit refuses these messages
                stack.gateway_flags += ["--max-body-bytes", str(16 * MIB)]
            if part == "refusals":
                stack.scheduler_flags = ["--max-queued-requests", "8", "--max-num-seqs", "4"]
            try:
                report[part] = PARTS[part](stack.up())
            finally:
                stack.down()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--attack", choices=[*bodies(), *ATTACKS], help="run this attack; without it, measure")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--part", choices=sorted(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "heavy_clients.json")
    parser.add_argument("--name", default="after", help="name of the column to write; other columns of the file stay")
    options = parser.parse_args()
    raise_file_limit()
    if options.attack:
        counts = uvloop.run(ATTACKS.get(options.attack, flood)(options.port, options.attack))
        print(json.dumps(counts), flush=True)
        sys.stdin.read()
        return
    columns = json.loads(options.out.read_text()) if options.out.is_file() else {}
    columns.setdefault(options.name, {"date": time.strftime("%Y-%m-%d")}).update(measure(options.part))
    options.out.write_text(json.dumps(columns, indent=1) + "\n")


if __name__ == "__main__":
    main()
