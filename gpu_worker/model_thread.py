"""The thread that runs the model, so that the event loop (heartbeats, the link) never waits for a step.

Plans go in through a queue and run strictly in order; with a window of two the next one is usually waiting when a step
ends, and nothing but the queue stands between two forward passes. Where there is a device that computes by itself, the
next step is launched while one runs, and a second thread waits for the results.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from gpu_worker.errors import DeviceError
from gpu_worker.runner import LaunchedStep, ModelRunner, StepStats
from paceline.v1.worker_pb2 import StepPlan, StepResult


@dataclass(slots=True, eq=False)
class LinkRun:
    """One link's use of the model. The callbacks run on the event loop, in order; none after close()."""

    on_result: Callable[[StepResult, StepStats], None]
    on_failure: Callable[[Exception], None]
    closed: bool = False
    failed: bool = False  # a step has; those behind it are skipped, results of those before it are still on their way

    def close(self) -> None:
        """Plans still queued are skipped; the step that runs now ends unheard."""
        self.closed = True


class StepFailed(Exception):
    """A forward pass raised; `requests` are those that held a slot."""

    def __init__(self, step: int, requests: list[str], cause: Exception) -> None:
        super().__init__(f"step {step} failed: {type(cause).__name__}: {cause}")
        self.requests = requests


class ModelThread:
    """start() and the rest belong to the event loop's thread; the runner belongs to this one's."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._inbox: SimpleQueue[tuple[LinkRun, StepPlan | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="paceline-model", daemon=True)
        # Steps in flight; used where launching does not wait for the step.
        self._launched: SimpleQueue[tuple[LinkRun, LaunchedStep] | None] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="paceline-results", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self._runner.is_asynchronous:
            self._waiter.start()

    def stop(self, timeout_s: float) -> None:
        """Blocks until the step that runs now has ended, or for `timeout_s`."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def begin(self, run: LinkRun) -> None:
        """A new link: every sequence of the one before is forgotten."""
        self._inbox.put((run, None))

    def submit(self, run: LinkRun, plan: StepPlan) -> None:
        self._inbox.put((run, plan))

    def _work(self) -> None:
        while (item := self._inbox.get()) is not None:
            run, plan = item
            if run.closed or run.failed:
                continue
            if plan is None:
                self._runner.reset()
            else:
                self._step(run, plan)

        self._launched.put(None)

    def _step(self, run: LinkRun, plan: StepPlan) -> None:
        try:
            launched = self._runner.launch(plan)
        except Exception as error:
            self._fail(run, plan.step, error)
        else:
            if self._runner.is_asynchronous:
                self._launched.put((run, launched))
            else:
                self._finish(run, launched)

    def _wait(self) -> None:
        while (item := self._launched.get()) is not None:
            self._finish(*item)

    def _finish(self, run: LinkRun, launched: LaunchedStep) -> None:
        if run.failed:
            return  # the step before has
        try:
            result = launched.result()
        except Exception as error:
            self._fail(run, launched.step, error)
        else:
            self._post(_deliver, run, result, launched.stats)

    def _fail(self, run: LinkRun, step: int, error: Exception) -> None:
        if run.failed:
            return  # an earlier step has, and this one because of it
        run.failed = True
        self._post(_deliver_failure, run, _classify(error, step, self._runner.request_ids()))

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop has been closed: the process is ending and nobody listens.
            self._inbox.put(None)


def _deliver(run: LinkRun, result: StepResult, stats: StepStats) -> None:
    if not run.closed:
        run.on_result(result, stats)


def _deliver_failure(run: LinkRun, failure: Exception) -> None:
    if not run.closed:
        run.close()
        run.on_failure(failure)


def _classify(error: Exception, step: int, requests: list[str]) -> Exception:
    message = str(error)
    broken = isinstance(error, (torch.OutOfMemoryError, MemoryError, DeviceError, torch.AcceleratorError))
    # The CPU allocator has no exception type of its own.
    if broken or "can't allocate memory" in message:
        failure: Exception = DeviceError(f"step {step}: {type(error).__name__}: {message}")
    else:
        failure = StepFailed(step, requests, error)
    failure.__cause__ = error
    return failure
