"""The model thread. Results come in order. With an asynchronous device, it launches the next plan while a step runs.
With a core to spare, it sends a result when the kernels of the next step start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gpu_worker.errors import DeviceError, StepFailed
from gpu_worker.model_thread import LinkRun, ModelThread
from gpu_worker.sampling.compiled import PreparedGrammars
from gpu_worker.steps.launched import StepStats
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.worker_pb2 import Grammar, GrammarOrders, GrammarPrepared, StepPlan, StepResult


@dataclass
class Launched:
    step: int
    error: Exception | None
    stats: StepStats = field(default_factory=StepStats)
    finished: threading.Event = field(default_factory=threading.Event)

    def result(self) -> StepResult:
        assert self.finished.wait(20)
        if self.error is not None:
            raise self.error
        return StepResult(step=self.step)


class Device:
    """Stands for a ModelRunner on a GPU: the test says when a step is done."""

    is_asynchronous = True
    tokenizer = None

    def __init__(self) -> None:
        self.launched: dict[int, Launched] = {}
        self.fails_at_launch: dict[int, Exception] = {}
        self.fails_later: dict[int, Exception] = {}
        self.resets = 0
        self.broken: Exception | None = None

    def reset(self, grammars: PreparedGrammars) -> None:
        self.resets += 1

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def request_ids(self) -> list[str]:
        return ["r1"]

    def launch(self, plan: StepPlan) -> Launched:
        if plan.step in self.fails_at_launch:
            raise self.fails_at_launch[plan.step]
        return self.launched.setdefault(plan.step, Launched(plan.step, self.fails_later.get(plan.step)))


@dataclass
class Rig:
    device: Device
    thread: ModelThread
    run: LinkRun
    results: list[int]
    failures: list[Exception]

    def submit(self, *steps: int) -> None:
        for step in steps:
            self.thread.submit(self.run, StepPlan(step=step))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - other threads make it true
                await asyncio.sleep(0.002)


async def running(device: Device) -> AsyncIterator[Rig]:
    thread = ModelThread(cast(ModelRunner, device))
    results: list[int] = []
    failures: list[Exception] = []
    run = LinkRun(lambda result, stats: results.append(result.step), failures.append, print)
    thread.start()
    thread.begin(run)
    yield Rig(device, thread, run, results, failures)
    for launched in device.launched.values():
        launched.finished.set()
    await asyncio.to_thread(thread.stop, 5.0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async for one in running(Device()):
        yield one


async def test_a_step_is_launched_while_the_one_before_runs(rig: Rig) -> None:
    rig.submit(1, 2)
    await rig.until(lambda: 2 in rig.device.launched)
    assert rig.results == []
    rig.device.launched[2].finished.set()
    rig.submit(3)
    await rig.until(lambda: 3 in rig.device.launched)
    assert rig.results == [], "a result overtook the one before"
    rig.device.launched[1].finished.set()
    await rig.until(lambda: rig.results == [1, 2])
    rig.device.launched[3].finished.set()
    await rig.until(lambda: rig.results == [1, 2, 3])
    assert rig.failures == []


async def test_steps_go_on_while_a_grammar_is_compiled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to forget a grammar is executed after the plans that arrived before the order."""
    compiles, may_end, forgotten = threading.Event(), threading.Event(), list[tuple[int, int]]()

    def prepare(grammars: PreparedGrammars, tokenizer: object, number: int, grammar: str) -> str:
        compiles.set()
        assert may_end.wait(20)
        return f"refused {grammar}" if number == 2 else ""

    def forget(grammars: PreparedGrammars, number: int) -> None:
        forgotten.append((number, max(rig.device.launched, default=0)))

    answers: list[GrammarPrepared] = []
    monkeypatch.setattr(PreparedGrammars, "prepare", prepare)
    monkeypatch.setattr(PreparedGrammars, "forget", forget)
    monkeypatch.setattr(rig.run, "on_grammar", answers.append)
    orders = GrammarOrders(prepare=[Grammar(id=1, grammar="a"), Grammar(id=2, grammar="b")])
    rig.thread.order_grammars(rig.run, orders)
    assert await asyncio.to_thread(compiles.wait, 20)
    rig.submit(1, 2)
    rig.thread.order_grammars(rig.run, GrammarOrders(forget=[9]))
    rig.submit(3)
    await rig.until(lambda: 3 in rig.device.launched)
    for step in (1, 2, 3):
        rig.device.launched[step].finished.set()
    await rig.until(lambda: rig.results == [1, 2, 3])
    assert not answers
    assert forgotten == [(9, 2)]
    may_end.set()
    await rig.until(lambda: len(answers) == 2)
    assert answers == [GrammarPrepared(id=1), GrammarPrepared(id=2, refused="refused b")]


async def test_a_closed_link_gets_no_message_about_a_grammar(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, answers = threading.Event(), list[int]()

    def prepare(grammars: PreparedGrammars, tokenizer: object, number: int, grammar: str) -> str:
        assert may_end.wait(20)
        return ""

    monkeypatch.setattr(PreparedGrammars, "prepare", prepare)
    monkeypatch.setattr(rig.run, "on_grammar", lambda prepared: answers.append(prepared.id))
    rig.thread.order_grammars(rig.run, GrammarOrders(prepare=[Grammar(id=1, grammar="a"), Grammar(id=2, grammar="b")]))
    rig.run.close()
    next_run = LinkRun(rig.run.on_result, rig.run.on_failure, lambda prepared: answers.append(10 + prepared.id))
    rig.thread.order_grammars(next_run, GrammarOrders(prepare=[Grammar(id=1, grammar="a")]))
    may_end.set()
    await rig.until(lambda: answers == [11])


async def test_a_step_that_fails_on_the_device_is_reported_once(rig: Rig) -> None:
    rig.device.fails_later = {2: RuntimeError("device-side assert"), 3: RuntimeError("and because of it")}
    rig.submit(1, 2, 3)
    await rig.until(lambda: 3 in rig.device.launched)
    for step in (1, 2, 3):
        rig.device.launched[step].finished.set()
    await rig.until(lambda: rig.failures)
    rig.submit(4)
    await asyncio.to_thread(rig.thread.stop, 5.0)
    await asyncio.sleep(0.05)
    (failure,) = rig.failures
    assert isinstance(failure, StepFailed)
    assert failure.requests == ["r1"]
    assert (failure.first, failure.last) == (2, 3), "the device had both steps: the worker cannot tell which one failed"
    assert str(failure) == "RuntimeError: device-side assert"
    assert rig.results == [1]
    assert 4 not in rig.device.launched


async def test_a_launch_that_fails_ends_the_link_at_once(rig: Rig) -> None:
    """The thread does not wait for the step in flight: the tokens of that step are computed again."""
    rig.device.fails_at_launch = {2: MemoryError("no more")}
    rig.submit(1, 2)
    await rig.until(lambda: rig.failures)
    (failure,) = rig.failures
    assert isinstance(failure, StepFailed)
    assert (failure.first, failure.last) == (1, 2)
    rig.device.launched[1].finished.set()
    await asyncio.to_thread(rig.thread.stop, 5.0)
    await asyncio.sleep(0.05)
    assert rig.results == []
    assert len(rig.failures) == 1


async def test_a_closed_link_gets_no_results(rig: Rig) -> None:
    rig.submit(1)
    await rig.until(lambda: 1 in rig.device.launched)
    rig.run.close()
    rig.device.launched[1].finished.set()
    second: list[int] = []
    run = LinkRun(lambda result, stats: second.append(result.step), rig.failures.append, print)
    rig.thread.begin(run)
    rig.device.launched.clear()
    rig.thread.submit(run, StepPlan(step=1))
    await rig.until(lambda: 1 in rig.device.launched)
    rig.device.launched[1].finished.set()
    await rig.until(lambda: second == [1])
    assert rig.results == []
    assert rig.device.resets == 2


async def test_a_device_is_checked_after_all_that_was_submitted(rig: Rig) -> None:
    rig.submit(1)
    await rig.thread.check()
    assert 1 in rig.device.launched
    rig.device.broken = RuntimeError("illegal memory access\nsee above")
    with pytest.raises(DeviceError, match=r"any more: RuntimeError: illegal memory access$"):
        await rig.thread.check()


class Cpu(Device):
    """Stands for a ModelRunner on a CPU: a step goes on, before and after it calls `before_kernels`, when the test says
    so."""

    is_asynchronous = False

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []  # that have begun
        self.without_kernels: set[int] = set()
        self.may_compute, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def call_before_kernels(self, call: Callable[[], None]) -> None:
        self.before_kernels = call

    def launch(self, plan: StepPlan) -> Launched:
        self.steps.append(plan.step)
        assert self.may_compute.acquire(timeout=20)
        launched = super().launch(plan)
        if plan.step not in self.without_kernels:
            self.before_kernels()
        assert self.may_end.acquire(timeout=20)
        launched.finished.set()
        return launched


@pytest.fixture
async def cpu() -> AsyncIterator[tuple[Rig, Cpu]]:
    device = Cpu()
    async for rig in running(device):
        yield rig, device
        for semaphore in (device.may_compute, device.may_end):
            semaphore.release(100)


async def test_a_result_is_sent_when_the_kernels_of_the_next_step_start(cpu: tuple[Rig, Cpu]) -> None:
    rig, device = cpu
    rig.submit(1, 2)
    device.may_compute.release()
    device.may_end.release()
    await rig.until(lambda: device.steps == [1, 2])
    await asyncio.sleep(0.05)
    assert rig.results == []
    device.may_compute.release()
    await rig.until(lambda: rig.results == [1])


async def test_a_result_is_sent_at_once_if_no_plan_waits(cpu: tuple[Rig, Cpu]) -> None:
    rig, device = cpu
    device.may_compute.release(2)
    device.may_end.release(2)
    rig.submit(1)
    await rig.until(lambda: rig.results == [1])
    rig.submit(2)
    await rig.until(lambda: rig.results == [1, 2])


async def test_results_of_steps_without_kernels_are_sent_in_order(cpu: tuple[Rig, Cpu]) -> None:
    rig, device = cpu
    device.without_kernels = {2, 3}
    rig.submit(1, 2, 3)
    device.may_compute.release(3)
    device.may_end.release(2)
    await rig.until(lambda: device.steps == [1, 2, 3])
    await rig.until(lambda: rig.results == [1])
    device.may_end.release()
    await rig.until(lambda: rig.results == [1, 2, 3])


async def test_the_last_result_is_sent_although_the_thread_is_to_end(cpu: tuple[Rig, Cpu]) -> None:
    rig, device = cpu
    rig.submit(1)
    await rig.until(lambda: device.steps == [1])
    stopped = asyncio.create_task(asyncio.to_thread(rig.thread.stop, 20))
    await asyncio.sleep(0.05)
    device.may_compute.release()
    device.may_end.release()
    await stopped
    await rig.until(lambda: rig.results == [1])


async def test_a_result_is_sent_before_the_failure_of_the_next_step(cpu: tuple[Rig, Cpu]) -> None:
    rig, device = cpu
    device.fails_at_launch = {2: MemoryError("no more")}
    seen: list[str] = []
    run = LinkRun(lambda result, stats: seen.append("result"), lambda error: seen.append("failure"), print)
    rig.thread.begin(run)
    for step in (1, 2):
        rig.thread.submit(run, StepPlan(step=step))
    device.may_compute.release(2)
    device.may_end.release(2)
    await rig.until(lambda: len(seen) == 2)
    assert seen == ["result", "failure"]
