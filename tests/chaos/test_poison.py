"""Requests that break the worker that runs them: each fails by itself, and every stream beside it goes on, token for
token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gpu_worker.server import RESTART_STATUS
from tests.support import load
from tests.support.faulty_worker import Fault, poison
from tests.support.stack import Stack

VOCAB = 900
NUM_TOKENS = 120
QUARANTINED = "paceline_scheduler_quarantined_requests_total"
FAILURES = "paceline_scheduler_step_failures_total"
WORKERS = ["worker-1", "worker-2"]
DEADLINES = ["--first-step-deadline-s", "3", "--step-deadline-s", "3", "--step-deadline-token-s", "0"]


@contextlib.asynccontextmanager
async def restarted(stack: Stack) -> AsyncIterator[list[int]]:
    """Workers that end are started again, as `paceline up` does; gives the statuses with which they ended."""
    statuses: list[int] = []

    async def watch() -> None:
        while True:
            for name in WORKERS:
                if (status := stack.processes[name].poll()) is not None:
                    statuses.append(status)
                    stack.start(name)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield statuses
    finally:
        watching.cancel()


async def test_each_kind_fails_alone_beside_streams_that_go_on(stack: Stack) -> None:
    stack.worker_module = "tests.support.faulty_worker"
    stack.worker_flags = ["--threads", "1", *DEADLINES]
    await asyncio.to_thread(stack.up, len(WORKERS))
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(6, 11, VOCAB)]
    undisturbed = await load.stream_all(stack.url, wanted)
    assert not [got.errors for got in undisturbed if got.errors]
    expected = {
        Fault.RAISE: ("alone in what failed, 2 times in a row", "failed: ValueError: a planted fault", set()),
        Fault.NAN: ("the model gave no number", "", set()),
        Fault.DIE: ("alone in what failed, 2 times in a row", "was lost in step", {-9}),
        Fault.BREAK: ("alone in what failed", "CUDA error: device-side assert triggered", {RESTART_STATUS}),
        Fault.HANG: ("alone in what failed", "failed: not done after 3.0 s", {RESTART_STATUS}),
    }
    for fault, (why, what, ends) in expected.items():
        before = [stack.metric(name) or 0 for name in (QUARANTINED, FAILURES)]
        async with restarted(stack) as statuses:
            poisoned = load.Wanted(poison(fault, 12, *range(20, 40)), NUM_TOKENS)
            *innocent, guilty = await load.stream_all(stack.url, [*wanted, poisoned])
        assert [got.text for got in innocent] == [got.text for got in undisturbed], fault
        assert not [got.errors for got in innocent if got.errors], fault
        [error] = guilty.errors
        assert why in error, fault
        assert what in error, fault
        assert set(statuses) == ends, fault
        quarantined, failures = [(stack.metric(name) or 0) for name in (QUARANTINED, FAILURES)]
        assert quarantined - before[0] == (fault is not Fault.NAN), fault
        assert failures - before[1] == (0 if fault is Fault.NAN else 3), fault
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_workers", len(WORKERS))
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
