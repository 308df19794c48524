"""Takes the screenshots of docs/page.md: an idle server, a busy one, a preempting one, a server just after its
scheduler was killed, and a preempted request.

    python scripts/page_screenshots.py [--folder docs/img]        (two minutes; needs chromium)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, ViewportSize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.chromium import open_browser, open_page
from tests.support.stack import Stack

SIZE = ViewportSize(width=1200, height=1080)
STORY = "Once upon a time there was a fox who lived at the edge of a forest and told stories. "  # style: person
TENANTS = ("acme", "beta", "gamma")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/img"))
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as logs, open_browser() as browser:
        stack = Stack(Path(logs))
        stack.worker_flags = ["--threads", "1", "--num-blocks", "384", "--max-num-seqs", "24"]
        try:
            stack.up(workers=2)
            take_all(stack, browser, folder)
        finally:
            stack.down()


def take_all(stack: Stack, browser: Browser, folder: Path) -> None:
    def take(page: Page, name: str) -> None:
        page.screenshot(path=folder / f"page-{name}.png")
        print(f"{name}: {(folder / f'page-{name}.png').stat().st_size // 1000} kB")

    with open_page(browser, stack.url, size=SIZE) as page:
        page.locator("[data-state=good]").wait_for()
        page.wait_for_timeout(5000)
        take(page, "idle")
    with open_page(browser, stack.url, size=SIZE, refusals=True) as page:
        page.wait_for_timeout(8000)
        with load(stack.url, streams=24, max_tokens=200):
            page.wait_for_timeout(30_000)
            take(page, "busy")
        httpx.post(f"{stack.url}/v1/policies", json={"capacity": "max-utilization"}).raise_for_status()
        with load(stack.url, streams=60, max_tokens=420):
            page.wait_for_timeout(25_000)
            take(page, "preempting")
            with open_page(browser, f"{stack.url}/#/live", size=SIZE, dark=True) as other:
                other.locator(".requests li:has(.back) a").first.click()
                other.locator(".life").wait_for()
                other.wait_for_timeout(2500)
                take(other, "request")
            stack.kill("scheduler")
            page.wait_for_timeout(3600)
            take(page, "killed")
            stack.start("scheduler")
            page.locator("[data-state=good]").wait_for()


@contextlib.contextmanager
def load(url: str, streams: int, max_tokens: int) -> Iterator[None]:
    """Streams with shared prefixes and three tenants, each started again when it ends."""
    ending = threading.Event()

    async def stream(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not ending.is_set():
            prompt = STORY * (1 + number % 4) + f"Story {number} of turn {turn}:"
            body = {"prompt": prompt, "max_tokens": max_tokens + 13 * (number % 5), "ignore_eos": True, "stream": True}
            body["tenant"] = TENANTS[number % len(TENANTS)]
            turn += 1
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        if ending.is_set():
                            return

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(stream(client, number) for number in range(streams)))

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
