"""Processes that are frozen and steps that never end: noticed in seconds, and no stream is any different for it.

How long it took is printed (`pytest -s`), not asserted: the machine may have other things to do.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.test_poison import restarted
from tests.support import load
from tests.support.faulty_worker import Fault, poison
from tests.support.stack import Stack

VOCAB = 900
NUM_TOKENS = 300
LINK_LOST = {
    "worker-1": ("scheduler", "worker detached"),
    "scheduler": ("gateway", "lost the scheduler"),
    "cache": ("scheduler", "cache link broke"),
}


async def said(log: Path, words: str) -> None:
    """Until it is in the log; what was in it before does not count."""
    seen = log.stat().st_size
    while words not in log.read_text(errors="replace")[seen:]:  # noqa: ASYNC240 - a few kilobytes
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("frozen", LINK_LOST)
async def test_a_frozen_process_is_noticed_and_may_come_back(stack: Stack, frozen: str) -> None:
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(6, 3, VOCAB)]
    right = await load.stream_all(stack.url, wanted)
    serving = asyncio.create_task(load.stream_all(stack.url, wanted))
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", len(wanted))
    process = stack.processes[frozen]
    witness, words = LINK_LOST[frozen]
    noticed = asyncio.create_task(said(stack.folder / f"{witness}.log", words))
    await asyncio.sleep(0)
    process.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    async with asyncio.timeout(30):
        await noticed
    print(f"{frozen} frozen: noticed after {time.monotonic() - began_s:.2f} s")
    assert not serving.done()
    process.send_signal(signal.SIGCONT)
    for got, undisturbed in zip(await serving, right, strict=True):
        assert (got.errors, got.text) == ([], undisturbed.text)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)


async def test_a_step_that_hangs_is_noticed_long_before_its_configured_deadline(stack: Stack) -> None:
    stack.worker_module = "tests.support.faulty_worker"
    stack.scheduler_flags = ["--poison-failures", "1"]
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(3, 3, VOCAB)]
    right = await load.stream_all(stack.url, wanted)  # and the worker learns its pace
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
