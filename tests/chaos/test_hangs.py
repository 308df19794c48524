"""Processes that are frozen and steps that never end: noticed in seconds, and no stream is any different for it.

How long it took is printed (`pytest -s`), not asserted: the machine may have other things to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.test_poison import restarted
from tests.support import load
from tests.support.faulty_worker import Fault, poison
from tests.support.stack import Stack

pytestmark = pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="takes a minute: run by make chaos")
VOCAB = 900
NUM_TOKENS = 300
RUNNING = "paceline_scheduler_num_requests_running"
LINK_LOST = {
    "worker-1": ("scheduler", "worker detached"),
    "scheduler": ("gateway", "lost the scheduler"),
    "cache": ("scheduler", "cache link broke"),
}


async def said(log: Path, words: str) -> None:
    """Until it is in the log; what was in it before does not count."""
    seen = len(await asyncio.to_thread(log.read_text, errors="replace"))
    while words not in await asyncio.to_thread(lambda: log.read_text(errors="replace")[seen:]):  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.02)


async def test_a_frozen_process_is_noticed_and_may_come_back(stack: Stack) -> None:
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(6, 3, VOCAB)]
    right = await load.stream_all(stack.url, wanted)
    for frozen, (witness, words) in LINK_LOST.items():
        serving = asyncio.create_task(load.stream_all(stack.url, wanted))
        await asyncio.to_thread(stack.wait_metric, RUNNING, len(wanted))
        noticed = asyncio.create_task(said(stack.folder / f"{witness}.log", words))
        await asyncio.sleep(0.1)
        stack.processes[frozen].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        async with asyncio.timeout(30):
            await noticed
        print(f"{frozen} frozen: noticed after {time.monotonic() - began_s:.2f} s")
        stack.processes[frozen].send_signal(signal.SIGCONT)
        for got, undisturbed in zip(await serving, right, strict=True):
            assert (got.errors, got.text) == ([], undisturbed.text)
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)


async def test_a_step_that_hangs_is_noticed_long_before_its_configured_deadline(stack: Stack) -> None:
    stack.worker_module = "tests.support.faulty_worker"
    stack.scheduler_flags = ["--poison-failures", "1"]
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(3, 3, VOCAB)]
    # The worker learns its pace; the second time also with what is cached, which it has to copy.
    right = await load.stream_all(stack.url, wanted)
    assert await load.stream_all(stack.url, wanted)
    async with restarted(stack) as statuses:
        serving = asyncio.create_task(load.stream_all(stack.url, wanted))
        guilty = asyncio.create_task(
            load.stream_all(stack.url, [load.Wanted(poison(Fault.HANG, 4, 30, 31, 32), NUM_TOKENS)])
        )
        began_s = time.monotonic()
        # Of 60 s configured. Alone with it, the next worker knows nothing yet: that would take 600 s.
        async with asyncio.timeout(50):
            while not statuses:  # noqa: ASYNC110 - a process ends
                await asyncio.sleep(0.02)
        print(f"step that hangs: its worker ended after {time.monotonic() - began_s:.2f} s")
        guilty.cancel()
        await asyncio.gather(guilty, return_exceptions=True)
        for got, undisturbed in zip(await serving, right, strict=True):
            assert (got.errors, got.text) == ([], undisturbed.text)
