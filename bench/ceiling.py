"""Measures how many workers, steps, tokens and requests per second one scheduler and one cache process can serve.

Real processes and real gRPC, wire included. The workers take 20 ms a step and compute nothing (bench/null_workers.py).
One session, such as a gateway opens, submits enough requests to keep all slots taken. The measured figures are the CPU
times of scheduler and cache: per worker step while no request begins or ends, and per request from its submission to
its end. The ceiling of a core follows from the scheduler's times alone: a core has 1 s of CPU time a second. The
cache's times are reported beside it. The report also has the step rate reached on this machine, where workers and
session share the cores with the scheduler.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import grpc.aio
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.machine import python_speed
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import SessionOpen, SessionRequest, SessionResponse, Submission
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.stack import Stack

WORKERS = (1, 8, 32, 64)
ROWS, STEP_MS = 256, 20.0
PROMPT_TOKENS = 128
# STEADY_TOKENS is so large that no request ends while steady steps are measured. CHURN_TOKENS is so small that many
# requests begin and end.
STEADY_TOKENS, CHURN_TOKENS = 1100, 100
SETTLE_S, MEASURED_S = 3.0, 8.0
WINDOW = 64  # messages that the session may be behind


@dataclass(frozen=True, slots=True)
class Shape:
    """The slots of each worker, the time of a step, and the tokens that a request asks for. `staggered`: the first
    requests ask for fewer tokens, so that they end one after another, not all in one step."""

    slots: int
    step_ms: float
    max_tokens: int
    staggered: bool = False

    def tokens_of(self, number: int, live: int) -> int:
        """Tokens that request `number` (from 1) asks for, if the session keeps `live` requests going."""
        if not self.staggered:
            return self.max_tokens
        return max(1, self.max_tokens * min(number, live) // live)


@dataclass(slots=True)
class SessionLoad:
    """A session that keeps `live` requests going until it is stopped."""

    scheduler: str
    live: int
    shape: Shape
    ended: int = 0
    tokens: int = 0
    failed: int = 0
    _handle: int = 0
    _out: asyncio.Queue[SessionRequest] = field(default_factory=asyncio.Queue)

    def _submissions(self, count: int) -> list[Submission]:
        """Prompts that share nothing."""
        made = []
        for _ in range(count):
            self._handle += 1
            prompt = np.full(PROMPT_TOKENS, self._handle, np.int32)
            max_tokens = self.shape.tokens_of(self._handle, self.live)
            sampling = SamplingParams(max_tokens=max_tokens, top_p=1.0, ignore_eos=True)
            made.append(
                Submission(
                    handle=self._handle,
                    request_id=str(self._handle),
                    prompt_token_ids=prompt.tobytes(),
                    sampling=sampling,
                    accepted_before=True,  # so the queue refuses no request
                )
            )
        return made

    async def run(self) -> None:
        channel = grpc.aio.insecure_channel(self.scheduler, options=[("grpc.max_receive_message_length", -1)])
        call = cast(Any, InferenceServiceStub(channel)).Session()
        opened = SessionOpen(session_id="ceiling", response_window=WINDOW, heartbeats=True)
        await call.write(SessionRequest(open=opened))
        for first in range(0, self.live, 256):
            self._out.put_nowait(SessionRequest(submissions=self._submissions(min(256, self.live - first))))

        async def write() -> None:
            while True:
                await call.write(await self._out.get())

        async def beat() -> None:
            while True:
                await asyncio.sleep(0.2)
                self._out.put_nowait(SessionRequest(responses_read=read))

        read = 0
        tasks = [asyncio.create_task(write()), asyncio.create_task(beat())]
        try:
            # Any other value (grpc.aio.EOF) is the end of the stream.
            while isinstance(message := await call.read(), SessionResponse):
                if message.heartbeat:
                    continue
                read += 1
                self.tokens += len(message.token_ids) // 4
                request = SessionRequest(responses_read=read)
                if message.endings:
                    self.ended += len(message.endings)
                    self.failed += sum(bool(ending.code) for ending in message.endings)
                    request.submissions.extend(self._submissions(len(message.endings)))
                if message.endings or read % 8 == 0:
                    self._out.put_nowait(request)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await channel.close(None)


class Services(Stack):
    """A cache and a scheduler alone."""

    def cpu_s(self, name: str) -> float:
        times = psutil.Process(self.processes[name].pid).cpu_times()
        return times.user + times.system

    def steps(self) -> float:
        return self.metric("paceline_scheduler_steps_total", of="scheduler") or 0.0


@contextmanager
def _workers(services: Services, count: int, shape: Shape) -> Iterator[None]:
    numbers = map(str, (count, shape.slots, shape.step_ms))
    command = [sys.executable, "-m", "bench.null_workers", services.scheduler, *numbers]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        services.wait_metric("paceline_scheduler_num_workers", count)
        yield
    finally:
        process.terminate()
        process.wait()


async def _measure(services: Services, workers: int, shape: Shape) -> dict[str, float]:
    load = SessionLoad(services.scheduler, workers * shape.slots, shape)
    running = asyncio.create_task(load.run())
    full = asyncio.get_running_loop().time() + 120.0
    # Wait until the requests have two tokens on average. SETTLE_S gives the last slots time to fill.
    while load.tokens < 2 * load.live:
        if running.done():
            await running
        assert asyncio.get_running_loop().time() < full, "the requests did not get two tokens on average within 120 s"
        await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLE_S)
    before = (services.steps(), services.cpu_s("scheduler"), services.cpu_s("cache"), load.ended, load.tokens)
    began_s = time.monotonic()
    await asyncio.sleep(MEASURED_S)
    after = (services.steps(), services.cpu_s("scheduler"), services.cpu_s("cache"), load.ended, load.tokens)
    wall_s = time.monotonic() - began_s
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not load.failed, f"{load.failed} requests failed"
    steps, scheduler_s, cache_s, ended, tokens = (now - then for now, then in zip(after, before, strict=True))
    return {
        "steps": steps,
        "scheduler_s": scheduler_s,
        "cache_s": cache_s,
        "requests": ended,
        "steps_per_s": steps / wall_s,
        "tokens_per_s": tokens / wall_s,
        "requests_per_s": ended / wall_s,
        "rows_per_step": tokens / max(1.0, steps),
    }


def ceiling(counts: tuple[int, ...] = WORKERS) -> dict[str, Any]:
    """Rows by number of workers: steady decoding, requests that begin and end, and the ceiling of a core."""
    rows = []
    for count in counts:
        shapes = (Shape(ROWS, STEP_MS, tokens) for tokens in (STEADY_TOKENS, CHURN_TOKENS))
        steady, churn = (measure(count, shape) for shape in shapes)
        step_us = 1e6 * steady["scheduler_s"] / steady["steps"]
        cache_step_us = 1e6 * steady["cache_s"] / steady["steps"]
        # From the CPU time of the churn run, subtract the cost of as many steady steps. The rest is the cost of the
        # requests.
        request_us = (1e6 * churn["scheduler_s"] - step_us * churn["steps"]) / max(1.0, churn["requests"])
        cache_request_us = (1e6 * churn["cache_s"] - cache_step_us * churn["steps"]) / max(1.0, churn["requests"])
        rows.append(
            {
                "workers": count,
                "rows_per_step": steady["rows_per_step"],
                "scheduler_us_per_step": step_us,
                "cache_us_per_step": cache_step_us,
                "workers_per_core": STEP_MS * 1000 / step_us,
                "tokens_per_s_per_core": 1e6 / step_us * steady["rows_per_step"],
                "scheduler_us_per_request": request_us,
                "cache_us_per_request": cache_request_us,
                "requests_per_s_per_core": 1e6 / request_us if request_us > 0 else None,
                "reached_steps_per_s": steady["steps_per_s"],
                "wanted_steps_per_s": count * 1000 / STEP_MS,
                "reached_tokens_per_s": steady["tokens_per_s"],
                "churn_requests_per_s": churn["requests_per_s"],
            }
        )
    return {"step_ms": STEP_MS, "slots": ROWS, "prompt_tokens": PROMPT_TOKENS, "loop_us": python_speed(), "rows": rows}


def measure(workers: int, shape: Shape, scheduler_flags: Sequence[str] = ()) -> dict[str, float]:
    """Counts and rates over MEASURED_S seconds, with newly started services. CPU times in seconds."""
    with TemporaryDirectory() as folder:
        services = Services(Path(folder))
        limit = str(1 << 30)
        services.scheduler_flags = ["--max-queued-requests", limit, "--max-queued-tokens", limit, *scheduler_flags]
        try:
            for name in ("cache", "scheduler"):
                services.start(name)
            services.wait_metric("paceline_scheduler_num_workers", 0)
            with _workers(services, workers, shape):
                return asyncio.run(_measure(services, workers, shape))
        finally:
            services.down()


def show(report: dict[str, Any], console: Console) -> None:
    title = f"One scheduler and one cache, {ROWS} rows a worker, {STEP_MS:g} ms steps; ceiling of a core"
    table = Table(title=title, title_justify="left")
    heads = ["workers", "rows a step", "scheduler µs/step", "cache µs/step", "workers/core", "tokens/s/core"]
    for head in [*heads, "scheduler µs/request", "cache µs/request", "requests/s/core", "steps/s here", "wanted"]:
        table.add_column(head, justify="right")
    for row in report["rows"]:
        names = ["workers", "rows_per_step", "scheduler_us_per_step", "cache_us_per_step", "workers_per_core"]
        names += ["tokens_per_s_per_core", "scheduler_us_per_request", "cache_us_per_request"]
        names += ["requests_per_s_per_core", "reached_steps_per_s", "wanted_steps_per_s"]
        table.add_row(*("-" if row[name] is None else f"{row[name]:,.0f}" for name in names))
    console.print(table)
    if (os.cpu_count() or 1) < 4:
        console.print("Workers and session take CPU time of the same cores: rates reached here are below the ceiling.")
