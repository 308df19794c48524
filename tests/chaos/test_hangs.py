"""Frozen processes, stuck event loops and steps that never end are noticed in seconds, and no stream changes. A long
prefill is not taken for a hang.

The times are printed (`pytest -s`), not asserted: the machine may be busy with other work.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.test_poison import restarted
from tests.support import load
from tests.support.faulty_worker import Fault, poison
from tests.support.ports import free_port
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="takes minutes: run by make chaos"),
    pytest.mark.timeout(300),
]
VOCAB = 900
NUM_TOKENS = 300
RUNNING = "paceline_scheduler_num_requests_running"
# With this model, a prompt of 2,000 tokens takes one step of several seconds.
LARGE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "eos_token_id": 7,
}  # fmt: skip
# By the victim: the service that must notice the hang, and words of its log line. The scheduler is the last victim:
# after a freeze it keeps its link to the cache, and for a while it allows the cache more silence on this link.
LINK_LOST = {
    "worker-1": ("scheduler", "worker lost"),
    "cache": ("scheduler", "cache link broke"),
    "gateway": ("scheduler", "session given up"),
    "scheduler": ("gateway", "lost the scheduler"),
}


async def said(log: Path, words: str) -> None:
    """Waits for new lines of the log that contain these words."""
    seen = len(await asyncio.to_thread(log.read_text, errors="replace"))
    while words not in await asyncio.to_thread(lambda: log.read_text(errors="replace")[seen:]):  # noqa: ASYNC110 - another process's log
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGUSR1], ids=["frozen", "stuck"])
async def test_a_service_that_hangs_is_noticed_and_may_come_back(stack: Stack, how: signal.Signals) -> None:
    """Frozen: the whole process stops. Stuck: only its event loop stops, so its pings are still answered."""
    stack.module = "tests.support.stuck_service"
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(6, 3, VOCAB)]
    right = await load.stream_all(stack.url, wanted)
    for victim, (witness, words) in LINK_LOST.items():
        serving = asyncio.create_task(load.stream_all(stack.url, wanted))
        await asyncio.to_thread(stack.wait_metric, RUNNING, len(wanted))
        noticed = asyncio.create_task(said(stack.folder / f"{witness}.log", words))
        await asyncio.sleep(0.1)
        stack.processes[victim].send_signal(how)
        began_s = time.monotonic()
        async with asyncio.timeout(30):
            await noticed
        print(f"{victim} {how.name}: noticed after {time.monotonic() - began_s:.2f} s")
        if how is signal.SIGSTOP:
            stack.processes[victim].send_signal(signal.SIGCONT)
        for got, undisturbed in zip(await serving, right, strict=True):
            assert (got.errors, got.text) == ([], undisturbed.text), victim
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.SULK], ids=["hang", "sulk"])
async def test_a_step_that_hangs_is_noticed_long_before_its_configured_deadline(stack: Stack, fault: Fault) -> None:
    """HANG: the worker notices it. SULK: the worker does not check its steps, but the scheduler sees that
    heartbeats come without a result of the step."""
    stack.worker_module = "tests.support.faulty_worker"
    stack.scheduler_flags = ["--poison-failures", "1"]
    await asyncio.to_thread(stack.up)
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(3, 3, VOCAB)]
    # The worker learns its pace, and in the second run also the pace of steps that copy cached blocks.
    right = await load.stream_all(stack.url, wanted)
    assert await load.stream_all(stack.url, wanted)
    async with restarted(stack) as statuses:
        serving = asyncio.create_task(load.stream_all(stack.url, wanted))
        poisoned = load.Wanted(poison(fault, 4, 30, 31, 32), NUM_TOKENS)
        failing = asyncio.create_task(load.stream_all(stack.url, [poisoned]))
        began_s = time.monotonic()
        # The limits are 60 s for a step, and 600 s for a worker's first step. The next worker does not know its pace
        # yet: alone with the poisoned request, it would notice the hang after 600 s.
        async with asyncio.timeout(50):
            if fault is Fault.SULK:
                await said(stack.folder / "scheduler.log", "it was allowed")
                stack.processes["worker-1"].kill()  # this worker is of no use any more
            while not statuses:  # noqa: ASYNC110 - a process ends
                await asyncio.sleep(0.02)
        print(f"step that hangs ({fault.name}): noticed after {time.monotonic() - began_s:.2f} s")
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        for got, undisturbed in zip(await serving, right, strict=True):
            assert (got.errors, got.text) == ([], undisturbed.text)


async def test_a_long_prefill_is_not_taken_for_a_hang(stack: Stack, tmp_path: Path) -> None:
    """The prefill takes longer than the liveness limit, before and after the worker knows the time of its steps."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    stack.model = str(tmp_path)
    stack.worker_flags = ["--threads", "1", "--load-format", "dummy", "--num-blocks", "700", "--max-num-seqs", "4"]
    await asyncio.to_thread(stack.up)
    short = load.Wanted([9, 10, 11], 260)
    for number in range(2):
        prompt = [(number + i) % 300 + 8 for i in range(2000)]
        began_s = time.monotonic()
        running = asyncio.create_task(load.stream_all(stack.url, [short]))
        [got] = await load.stream_all(stack.url, [load.Wanted(prompt, 2)])
        took_s = time.monotonic() - began_s
        assert (got.errors, got.finish_reason) == ([], "length")
        assert took_s > 2.0, "the prefill is too short for this test"
        [beside] = await running
        assert (beside.errors, beside.finish_reason) == ([], "length")
        print(f"prompt of 2000 tokens: {took_s:.1f} s, the longest pause beside it {beside.longest_pause_s:.1f} s")
    said_by_scheduler = (stack.folder / "scheduler.log").read_text()
    assert not re.search("worker lost|step failed|worker detached", said_by_scheduler), said_by_scheduler


@pytest.mark.parametrize("service", ["cache", "scheduler", "gateway"])
def test_up_starts_a_service_again_that_does_not_answer(service: str, tmp_path: Path) -> None:
    """Frozen for good: only `paceline up` can do anything about it."""
    ports = [free_port() for _ in range(4)]
    flags = ["--port", "--grpc-port", "--scheduler-port", "--cache-port"]
    arguments = [word for pair in zip(flags, map(str, ports), strict=True) for word in pair]
    command = [sys.executable, "-m", "services.cli", "up", "--hang-s", "6", "--threads", "1", "--metrics-port", "0"]
    command += arguments
    body = {"prompt": "Once there was", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{ports[0]}"
    with (tmp_path / "up.log").open("w") as log:
        up = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "Ctrl-C" in (tmp_path / "up.log").read_text())
        with httpx.Client(base_url=url, timeout=90, trust_env=False) as http:
            right = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            children = psutil.Process(up.pid).children()
            [victim] = [child for child in children if f"serve {service} " in " ".join(child.cmdline())]
            answers: list[str] = []

            def ask() -> None:
                answers.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

            asking = threading.Thread(target=ask)
            if service != "gateway":
                asking.start()
            victim.suspend()
            began_s = time.monotonic()
            wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
            print(f"{service} frozen for good: killed after {time.monotonic() - began_s:.1f} s")
            if service == "gateway":
                wait_until(lambda: "starts again" in (tmp_path / "up.log").read_text())
                wait_until(lambda: is_ready(url))
                asking.start()
            asking.join()
            assert answers == [right]
    finally:
        up.terminate()
        up.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
