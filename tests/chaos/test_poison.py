"""Requests that break the worker that runs them: each fails by itself, and every stream beside it goes on, token for
token."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from services.runtime import exit_status
from tests.support import load
from tests.support.faulty_worker import Fault, poison
from tests.support.stack import Stack

VOCAB = 900
NUM_TOKENS = 120
DEADLINES = ["--first-step-deadline-s", "3", "--step-deadline-s", "3", "--step-deadline-token-s", "0"]


@contextlib.asynccontextmanager
async def restarted(stack: Stack) -> AsyncIterator[list[int]]:
    """A worker that ends is started again, as `paceline up` does; gives the statuses with which it ended."""
    statuses: list[int] = []

    async def watch() -> None:
        while True:
            if (status := stack.processes["worker-1"].poll()) is not None:
                statuses.append(status)
                stack.start("worker-1")
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield statuses
    finally:
        watching.cancel()


async def test_each_poisoned_request_fails_alone_while_other_streams_go_on(stack: Stack) -> None:
    """All kinds at once: the step with the first failure has all of these requests, so they are retried one by one."""
    stack.worker_module = "tests.support.faulty_worker"
    stack.worker_flags = ["--threads", "1", *DEADLINES]
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(4, 11, VOCAB)]
    undisturbed = await load.stream_all(stack.url, wanted)
    assert not [got.errors for got in undisturbed if got.errors]
    faults = {
        Fault.RAISE: ("was the only request in", "failed: ValueError: a planted fault"),
        Fault.NAN: ("the model's output contains NaN or infinity", ""),
        Fault.DIE: ("was the only request in", "was lost in step"),
        Fault.HANG: ("was the only request in", "failed: not done after 3.0 s"),
    }
    poisoned = [load.Wanted(poison(fault, 10 + i, *range(20, 40)), NUM_TOKENS) for i, fault in enumerate(faults)]
    async with restarted(stack) as statuses:
        got = await load.stream_all(stack.url, [*wanted, *poisoned])
        # The last request fails as soon as its worker reports the failure; then the worker ends.
        while set(statuses) != {-signal.SIGKILL, exit_status.RESTART}:  # noqa: ASYNC110 - a process ends
            await asyncio.sleep(0.05)
    assert [one.text for one in got[:4]] == [one.text for one in undisturbed]
    assert not [one.errors for one in got[:4] if one.errors]
    for (fault, (why, what)), failed in zip(faults.items(), got[4:], strict=True):
        [error] = failed.errors
        assert why in error, fault
        assert what in error, fault
    assert stack.metric("paceline_scheduler_quarantined_requests_total") == 3
    # One failure of all requests together, and two of each poisoned request alone. A slow machine adds failures: there
    # a slow step may be taken for hung.
    assert (stack.metric("paceline_scheduler_step_failures_total") or 0) >= 7
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
