"""What the open page costs: tokens per second of 32 streams with the page closed and open, in turns, in one run.

    python -m bench.page_cost [--turns 6] [--seconds 20]        (results in bench/results/page_cost.json)

The page runs in headless Chromium on the same machine, at the lowest priority. `stream` is without a browser: a client
that only reads the stream, which is what a page on another machine costs the services.
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
from typing import Any, Literal

import httpx

from bench.machine import load_note, python_speed
from tests.support.chromium import BINARY, open_browser, open_page
from tests.support.stack import Stack

RESULT = Path(__file__).parent / "results" / "page_cost.json"
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS, WARM_S = 32, 64, 200, 4.0
Viewer = Literal["closed", "stream", "page"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=6, help="measurements of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    viewers: list[Viewer] = ["closed", "stream"] if BINARY is None else ["closed", "stream", "page"]
    note = load_note(os.getloadavg()[0])
    rates: dict[Viewer, list[float]] = {viewer: [] for viewer in viewers}
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        try:
            stack.up()
            with load(stack.url):
                time.sleep(WARM_S)
                for turn in range(arguments.turns):
                    # Each kind comes first as often as last.
                    for viewer in viewers if turn % 2 == 0 else viewers[::-1]:
                        with watching(stack.url, viewer):
                            time.sleep(WARM_S)
                            rates[viewer].append(tokens_per_s(stack.url, arguments.seconds))
                        print(f"turn {turn + 1}, {viewer}: {rates[viewer][-1]:,.0f} tokens/s", flush=True)
        finally:
            stack.down()
    result = summary(rates) | {"streams": STREAMS, "seconds": arguments.seconds, "python_us": python_speed()}
    if note:
        result["note"] = note
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["cost"]))


def summary(rates: dict[Viewer, list[float]]) -> dict[str, Any]:
    """Costs are medians over turns of 1 - rate / rate of the same turn without a viewer."""
    closed = rates["closed"]
    costs = {
        viewer: [1 - rate / base for rate, base in zip(found, closed, strict=True)]
        for viewer, found in rates.items()
        if viewer != "closed"
    }
    return {
        "tokens_per_s": {viewer: [round(rate, 1) for rate in found] for viewer, found in rates.items()},
        "cost": {viewer: round(statistics.median(found), 4) for viewer, found in costs.items()},
        "costs": {viewer: [round(cost, 4) for cost in found] for viewer, found in costs.items()},
    }


def tokens_per_s(url: str, seconds: float) -> float:
    """Over this time, from the gateway's own counter."""
    first, began_s = generated(url), time.perf_counter()
    time.sleep(seconds)
    return (generated(url) - first) / (time.perf_counter() - began_s)


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
        str(OUTPUT_TOKENS),
    ]
    with running(client):
        yield


@contextlib.contextmanager
def watching(url: str, viewer: Viewer) -> Iterator[None]:
    """A viewer, while the context lasts."""
    if viewer == "closed":
        yield
    elif viewer == "stream":
        with running(["curl", "-sN", "-o", os.devnull, f"{url}/v1/live?stream=true"]):
            yield
    else:
        with tempfile.TemporaryDirectory() as folder:
            # The figure is what the page costs the services, not what drawing costs a machine of two cores.
            polite = Path(folder) / "chromium"
            polite.write_text(f'#!/bin/sh\nexec nice -n 19 "{BINARY}" "$@"\n')
            polite.chmod(0o755)
            with open_browser(str(polite)) as browser, open_page(browser, url) as page:
                page.locator("[data-state=good]").wait_for()
                yield


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
