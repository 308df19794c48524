"""The thread that runs the model, so that the event loop (heartbeats, the link) never waits for a step.

Plans enter a queue, and run strictly in order. The scheduler keeps several in flight, so the next plan is usually in
the queue when a step ends, and the next forward pass starts at once. If the device computes asynchronously, the next
step is launched while one runs, and a second thread waits for the results.

On a CPU, a result is sent when the kernels of the next step start, if that step leaves a core. They run without the
GIL. Sent earlier, it would wake the event loop's thread, which would compete for the GIL with the Python code between
two steps. Steps that take all cores send it before: the services can handle it while other cores have nothing to do.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from gpu_worker.errors import DeviceError, StepFailed
from gpu_worker.sampling.compiled import Compiler, PreparedGrammars
from gpu_worker.steps.launched import LaunchedStep, StepStats
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.worker_pb2 import Grammar, GrammarOrders, GrammarPrepared, KeptSequence, StepPlan, StepResult

MAX_MESSAGE = 300  # characters
MAX_KEPT_BYTES = 8 * 2**20  # the limit in worker.proto
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class LinkRun:
    """One link's use of the model. The callbacks run on the event loop, in order, and never after close()."""

    on_result: Callable[[StepResult, StepStats], None]
    on_failure: Callable[[Exception], None]
    on_grammar: Callable[[GrammarPrepared], None]
    closed: bool = False
    grammars: PreparedGrammars = field(default_factory=PreparedGrammars)
    failed: bool = False  # a step failed: later steps are skipped, and results of earlier steps still arrive

    def close(self) -> None:
        """Skip the queued plans. The result of the running step is dropped."""
        self.closed = True


class ModelThread:
    """Call every method from the event loop's thread, except stop(), which blocks. Only the model thread runs steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.incarnation = secrets.token_hex(8)  # changes after a failed step
        self._inbox: SimpleQueue[tuple[LinkRun, StepPlan | None] | Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="paceline-model", daemon=True)
        # Steps in flight, if launching does not wait for the step.
        self._launched: SimpleQueue[tuple[LinkRun, LaunchedStep] | None] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="paceline-results", daemon=True)
        self._unfinished: deque[int] = deque()  # their step numbers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._compiler = Compiler()
        self._unsent: tuple[LinkRun, StepResult, StepStats] | None = None  # of the last step
        if not runner.is_asynchronous:
            runner.call_before_kernels(self._send)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self._runner.is_asynchronous:
            self._waiter.start()

    def stop(self, timeout_s: float) -> None:
        """Block until the running step has ended, or for `timeout_s`."""
        self._compiler.close()
        self._inbox.put(None)
        self._thread.join(timeout_s)

    async def check(self) -> None:
        """Check that the device still computes, after all submitted plans. Raises DeviceError."""
        await self._ask(self._runner.check)

    async def kept(self) -> list[KeptSequence]:
        """The contents of the worker's blocks, after all submitted plans. Raises DeviceError."""
        return await self._ask(partial(self._runner.kept, MAX_KEPT_BYTES))

    async def _ask(self, call: Callable[[], T]) -> T:
        """Call the runner between two steps."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(self._answer, call, answer))
        return await answer

    def request_ids(self) -> list[str]:
        """The requests of the step launched last."""
        return self._runner.request_ids()

    def begin(self, run: LinkRun) -> None:
        """Start a new link. Every sequence of the last link is forgotten."""
        self._inbox.put((run, None))

    def submit(self, run: LinkRun, plan: StepPlan) -> None:
        self._inbox.put((run, plan))

    def order_grammars(self, run: LinkRun, orders: GrammarOrders) -> None:
        """Compile grammars in parallel to the steps. The answers arrive like those of steps. A grammar is forgotten
        after the plans that were submitted before."""
        for number in orders.forget:
            self._inbox.put(partial(run.grammars.forget, number))
        for one in orders.prepare:
            self._compiler.submit(partial(self._prepare, run, one), partial(self._post, _deliver_grammar, run, one.id))

    def _prepare(self, run: LinkRun, grammar: Grammar) -> str:
        return "" if run.closed else run.grammars.prepare(self._runner.tokenizer, grammar.id, grammar.grammar)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            if callable(item):
                item()
                continue
            run, plan = item
            if run.closed or run.failed:
                continue
            if plan is None:
                self._runner.reset(run.grammars)
            else:
                self._step(run, plan)
        self._send()
        self._launched.put(None)

    def _next(self) -> tuple[LinkRun, StepPlan | None] | Callable[[], None] | None:
        if self._inbox.empty():
            self._send()
        return self._inbox.get()

    def _send(self) -> None:
        """Send the last step's result, if that is still to be done."""
        if self._unsent is not None:
            unsent, self._unsent = self._unsent, None
            self._post(_deliver, *unsent)

    def _answer(self, call: Callable[[], T], answer: asyncio.Future[T]) -> None:
        try:
            result = call()
        except Exception as error:
            failure = DeviceError(f"the device does not compute any more: {_one_line(error)}")
            failure.__cause__ = error
            self._post(_settle, answer, answer.set_exception, failure)
        else:
            self._post(_settle, answer, answer.set_result, result)

    def _step(self, run: LinkRun, plan: StepPlan) -> None:
        try:
            launched = self._runner.launch(plan)
        except Exception as error:
            # The device may report now an error of an earlier step that is still running.
            self._fail(run, min(tuple(self._unfinished), default=plan.step), plan.step, error)
        else:
            if self._runner.is_asynchronous:
                self._unfinished.append(plan.step)
                self._launched.put((run, launched))
            else:
                self._finish(run, launched)

    def _wait(self) -> None:
        while (item := self._launched.get()) is not None:
            self._finish(*item)
            self._unfinished.popleft()

    def _finish(self, run: LinkRun, launched: LaunchedStep) -> None:
        if run.failed:
            return  # an earlier step has failed
        try:
            result = launched.result()
        except Exception as error:
            self._fail(run, launched.step, max(tuple(self._unfinished), default=launched.step), error)
            return
        if self._runner.is_asynchronous:
            self._post(_deliver, run, result, launched.stats)
        else:
            self._send()  # of a step before this one, if this one had no kernels
            self._unsent = run, result, launched.stats

    def _fail(self, run: LinkRun, first: int, last: int, error: Exception) -> None:
        if run.failed:
            return  # an earlier step has failed, and has caused this error
        run.failed = True
        self._send()
        self.incarnation = secrets.token_hex(8)
        failure = StepFailed(first, last, self._runner.request_ids(), _one_line(error))
        failure.__cause__ = error
        self._post(_deliver_failure, run, failure)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: the process is ending.
            self._inbox.put(None)


def _deliver(run: LinkRun, result: StepResult, stats: StepStats) -> None:
    if not run.closed:
        run.on_result(result, stats)


def _deliver_grammar(run: LinkRun, number: int, refused: str) -> None:
    if not run.closed:
        run.on_grammar(GrammarPrepared(id=number, refused=refused))


def _deliver_failure(run: LinkRun, failure: Exception) -> None:
    if not run.closed:
        run.close()
        run.on_failure(failure)


def _settle(answer: asyncio.Future[T], settle: Callable[[Any], None], what: object) -> None:
    if not answer.done():  # otherwise the caller has stopped waiting
        settle(what)


def _one_line(error: Exception) -> str:
    """The first line of the error, for the scheduler, a client and the log."""
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"
