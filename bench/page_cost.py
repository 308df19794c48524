"""What the open page costs the services: CPU time per token, and tokens per second, of 32 streams with the page closed
and open, in turns, in one run.

    python -m bench.page_cost [--turns 40] [--seconds 6]        (results in bench/results/page_cost.json)

The page runs in headless Chromium on the same machine, at the lowest priority. `page`: the page shows its live view.
`closed`: the page shows another view, so it reads no stream. `stream`: the page is `closed`, and another client only
reads the stream, which is what a page on another machine costs the services.

All services are busy in this run, so CPU time per token bounds their throughput. The machine's pace changes by more
than the page costs. So the turns are short and many, each is compared with the one beside it, and the result has its
standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import psutil
from playwright.sync_api import Page

from bench.machine import load_note, python_speed
from tests.support.chromium import BINARY, open_browser, open_page
from tests.support.stack import Stack

RESULT = Path(__file__).parent / "results" / "page_cost.json"
# The outputs have different lengths. Otherwise the streams would end together, and only some turns would have prefills.
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, (100, 300)
# A measurement begins after the page has drawn its first state, so the cost of opening the page is not measured.
WARM_S, SETTLE_S = 6.0, 3.0
Viewer = Literal["closed", "stream", "page"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=40, help="measurements of each kind")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    viewers: list[Viewer] = ["closed", "stream"] if BINARY is None else ["closed", "stream", "page"]
    note = load_note(os.getloadavg()[0])
    found: dict[Viewer, list[PageLoad]] = {viewer: [] for viewer in viewers}
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        try:
            stack.up()
            with load(stack.url), page_on(stack.url) as page:
                time.sleep(WARM_S)
                for turn in range(arguments.turns):
                    # Each kind comes first as often as last.
                    for viewer in viewers if turn % 2 == 0 else viewers[::-1]:
                        with watching(stack.url, viewer, page):
                            time.sleep(SETTLE_S)
                            found[viewer].append(measure(stack, arguments.seconds))
                        rate, cpu_us = found[viewer][-1]
                        print(f"turn {turn + 1}, {viewer}: {rate:,.0f} tokens/s, {cpu_us:.1f} us/token", flush=True)
        finally:
            stack.down()
    result = summary(found) | {"streams": STREAMS, "seconds": arguments.seconds, "python_us": python_speed()}
    if note:
        result["note"] = note
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["cost"]))


class PageLoad(NamedTuple):
    """One measurement. The CPU time is that of all services."""

    tokens_per_s: float
    cpu_us_per_token: float


def summary(found: dict[Viewer, list[PageLoad]]) -> dict[str, Any]:
    """Compares each measurement of a viewer with the `closed` one of the same turn. Reports the mean of the relative
    costs, and its standard error. `cost`: how much the CPU time per token grows. `throughput_cost`: how much tokens per
    second fall."""
    closed = found["closed"]
    result: dict[str, Any] = {"cost": {}, "throughput_cost": {}}
    for viewer, own in found.items():
        if viewer != "closed":
            pairs = list(zip(own, closed, strict=True))
            cpu = [mine.cpu_us_per_token / base.cpu_us_per_token - 1 for mine, base in pairs]
            rate = [1 - mine.tokens_per_s / base.tokens_per_s for mine, base in pairs]
            result["cost"][viewer], result["throughput_cost"][viewer] = with_error(cpu), with_error(rate)
    result["cpu_us_per_token"] = {
        viewer: [round(one.cpu_us_per_token, 1) for one in own] for viewer, own in found.items()
    }
    result["tokens_per_s"] = {viewer: [round(one.tokens_per_s, 1) for one in own] for viewer, own in found.items()}
    return result


def with_error(numbers: list[float]) -> dict[str, float]:
    """The mean and its standard error."""
    error = statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0.0
    return {"mean": round(statistics.fmean(numbers), 4), "standard_error": round(error, 4)}


def measure(stack: Stack, seconds: float) -> PageLoad:
    """Measures for this time. Tokens are from the gateway's own counter."""
    first, first_cpu_s, began_s = generated(stack.url), cpu_s(stack), time.perf_counter()
    time.sleep(seconds)
    tokens, used_s = generated(stack.url) - first, cpu_s(stack) - first_cpu_s
    return PageLoad(tokens / (time.perf_counter() - began_s), 1e6 * used_s / tokens)


def cpu_s(stack: Stack) -> float:
    """CPU time of all services and their children so far."""
    total = 0.0
    for process in stack.processes.values():
        service = psutil.Process(process.pid)
        for one in (service, *service.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def generated(url: str) -> float:
    """Output tokens since the gateway's start."""
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith("paceline_gateway_generation_tokens_total"):
            return float(line.split()[-1])
    raise AssertionError("the gateway has no counter of tokens")


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Keeps STREAMS streams running, in a process of its own."""
    client = [
        sys.executable,
        "-m",
        "bench.client",
        url,
        str(STREAMS),
        str(10**9),
        str(PROMPT_TOKENS),
        *map(str, OUTPUT_TOKENS),
    ]
    with running(client):
        yield


@contextlib.contextmanager
def page_on(url: str) -> Iterator[Page | None]:
    """The open page, away from its live view; None without Chromium."""
    if BINARY is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        # The figure is what the page costs the services, not what drawing costs a machine of two cores.
        polite = Path(folder) / "chromium"
        polite.write_text(f'#!/bin/sh\nexec nice -n 19 "{BINARY}" "$@"\n')
        polite.chmod(0o755)
        with open_browser(str(polite)) as browser, open_page(browser, f"{url}/#/playground") as page:
            yield page


@contextlib.contextmanager
def watching(url: str, viewer: Viewer, page: Page | None) -> Iterator[None]:
    """A viewer, while the context lasts."""
    if viewer == "closed":
        yield
    elif viewer == "stream":
        with running(["curl", "-sN", "-o", os.devnull, f"{url}/v1/live?stream=true"]):
            yield
    else:
        assert page is not None
        page.evaluate("location.hash = '#/live'")
        page.locator("[data-state=good]").wait_for()
        yield
        page.evaluate("location.hash = '#/playground'")


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A process in a group of its own, which is ended with all its children."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait()


if __name__ == "__main__":
    main()
