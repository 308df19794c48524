"""Measures how much grammars that are costly to compile slow down other clients.

The real services on this machine serve the demo model. Three clients stream plain completions. Four connections of
another process send grammars of one kind. Each grammar differs a little from the one before, so that no cache helps.
Two more phases are for comparison: requests with a simple mistake instead, and no other process. The results of each
phase are the inter-token latency and the time to first token of the plain streams, and the statuses of the other
requests. Per kind they also have the peak resident memory of worker and gateway. `--before FOLDER` also measures
another checkout of the repository in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from bench.overload.overload import percentile
from tests.support.stack import Stack

SECONDS, VICTIMS, ATTACKERS, OUTPUT_TOKENS = 4.0, 3, 4, 64
PAUSE_S = 0.1  # between two requests of an attacker
MISTAKE = "max_tokens of -1"


def hostile_grammar(kind: str, number: int) -> dict[str, Any]:
    """The `structured_outputs` of request `number` of this kind."""
    match kind:
        case "multipleOf 5,000,011":
            return {"json": {"type": "integer", "multipleOf": 5_000_011 + 2 * number}}
        case "product of multipleOf":
            primes = [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]
            return {"json": {"allOf": primes, "maximum": 10**9 + number}}
        case "x* 30,000 times":
            return {"regex": "x*" * 30_000 + f"{number}"}
        case "2,000 rules":
            rules = "\n".join(f'r{i}: "a{i}" | ""' for i in range(2000))
            return {"grammar": f'start: "{number}" {" ".join(f"r{i}" for i in range(2000))}\n{rules}'}
        case "400 properties":
            properties = {f"property_{i}_{number}": {"type": "string", "maxLength": 20} for i in range(400)}
            return {"json": {"type": "object", "properties": properties}}
    raise ValueError(kind)


KINDS = ("multipleOf 5,000,011", "product of multipleOf", "x* 30,000 times", "2,000 rules", "400 properties")


async def attack(url: str, kind: str) -> None:
    """Sends requests of this kind until stdin ends, then prints the number of answers by status."""
    statuses: Counter[str] = Counter()
    numbers = iter(range(10**9))

    async def attacker(client: httpx.AsyncClient) -> None:
        while True:
            body: dict[str, Any] = {"prompt": "a", "max_tokens": -1}
            if kind != MISTAKE:
                body = {"prompt": "a", "max_tokens": 4, "structured_outputs": hostile_grammar(kind, next(numbers))}
            try:
                answer = await client.post(f"{url}/v1/completions", json=body)
                statuses[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                statuses[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_S)

    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as client:
        tasks = [asyncio.create_task(attacker(client)) for _ in range(ATTACKERS)]
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in tasks:
            task.cancel()
        print(json.dumps(statuses))


async def plain_streams(url: str, seconds: float) -> dict[str, Any]:
    """The inter-token latency and the time to first token of plain streams, in ms. If a gap between tokens has not
    ended after `seconds`, it counts with its length so far."""
    gaps: list[float] = []
    firsts: list[float] = []
    until_s = time.perf_counter() + seconds
    waiting_since = [0.0] * VICTIMS

    async def victim(client: httpx.AsyncClient, index: int) -> None:
        while True:
            body = {"prompt": "Once", "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
            began_s = waiting_since[index] = time.perf_counter()
            last_s = 0.0
            try:
                async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now_s = waiting_since[index] = time.perf_counter()
                        (gaps if last_s else firsts).append(1000 * (now_s - (last_s or began_s)))
                        last_s = now_s
            except httpx.HTTPError:
                await asyncio.sleep(0.05)

    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        tasks = [asyncio.create_task(victim(client, index)) for index in range(VICTIMS)]
        await asyncio.sleep(until_s - time.perf_counter())
        gaps += [1000 * (time.perf_counter() - since) for since in waiting_since]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "tokens": len(gaps) + len(firsts) - VICTIMS,
        "itl_ms": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "max": round(max(gaps))},
        "ttft_ms": {"p50": percentile(firsts, 0.5), "max": round(max(firsts))} if firsts else None,
    }


def most_resident_mib(stack: Stack, name: str) -> int | None:
    """The peak resident memory of a service's process; None if it has died. The processes that try grammars are not
    measured, because they have a memory limit."""
    try:
        status = Path(f"/proc/{stack.processes[name].pid}/status").read_text()
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) // 1024 if lines else None


async def under_attack(stack: Stack, kind: str) -> dict[str, Any]:
    """The latencies of the plain streams while another process sends requests of this kind, and their answers."""
    attacker = subprocess.Popen(  # noqa: ASYNC220 - nothing is measured yet
        [sys.executable, "-m", "bench.overload.hostile_grammars", "--attack", kind, "--url", stack.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert attacker.stdout is not None
    assert attacker.stdout.readline() == "ready\n"
    times = await plain_streams(stack.url, SECONDS)
    return {**times, "answers": json.loads(attacker.communicate("")[0])}


async def measure(stack: Stack, kind: str) -> dict[str, Any]:
    await plain_streams(stack.url, 1.0)  # warm
    quiet = await plain_streams(stack.url, SECONDS)
    mistake = await under_attack(stack, MISTAKE)
    hostile = await under_attack(stack, kind)
    most = {name: most_resident_mib(stack, name) for name in ("worker-1", "gateway")}
    return {"quiet": quiet, MISTAKE: mistake, "grammars": hostile, "most_resident_mib": most}


def run(folder: Path, kind: str) -> dict[str, Any]:
    """Starts the services of the checkout in `folder` and measures them."""
    environment, here = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory() as logs:
        stack = Stack(Path(logs))
        os.environ["PYTHONPATH"] = f"{folder}:{folder / 'protos'}"
        os.chdir(folder)
        try:
            stack.up()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(here)
            return asyncio.run(measure(stack, kind))
        finally:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(here)
            for process in stack.processes.values():
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, which is measured as well")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "hostile_grammars.json")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        asyncio.run(attack(args.url, args.attack))
        return
    checkouts = {"now": Path(__file__).parents[2]}
    if args.before:
        checkouts = {"before": args.before.resolve(), **checkouts}
    results: dict[str, Any] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "kinds": {}}
    for kind in args.kinds:
        results["kinds"][kind] = {name: run(folder, kind) for name, folder in checkouts.items()}
        print(kind, json.dumps(results["kinds"][kind]), flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
