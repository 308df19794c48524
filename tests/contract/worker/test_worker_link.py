"""The worker's server against a scheduler played by hand, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc.aio
import httpx
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from gpu_worker.build import BuiltWorker, build_worker
from gpu_worker.errors import StepOverdue
from gpu_worker.models.decoder import Decoder
from gpu_worker.sampling.compiled import NO_TOKENIZER
from gpu_worker.server import DeviceLost, run_worker, serve
from gpu_worker.settings import WorkerSettings
from gpu_worker.steps.launched import LaunchedStep
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import Grammar, GrammarOrders, GrammarPrepared, NewSequence, StepPlan, StepResult
from services.runtime import exit_status
from services.runtime.service import Addresses
from tests.contract.worker.fake_scheduler import FakeScheduler, WorkerLink

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}


def pack(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def first_plan() -> dict[str, Any]:
    sequence = NewSequence(
        slot=0,
        token_ids=pack(1, 2, 3),
        num_prompt_tokens=3,
        block_table=pack(1, 2, 3),
        sampling=SamplingParams(top_p=1, max_tokens=40),
        request_id="req-1",
    )
    return {"new_sequences": [sequence], "prefill_slots": pack(0), "prefill_tokens": pack(3)}


@dataclass
class Rig:
    scheduler: FakeScheduler
    settings: WorkerSettings
    stop: asyncio.Event
    worker: asyncio.Task[None]
    ready: asyncio.Future[Addresses]

    async def accept(self) -> WorkerLink:
        """The next link. Raises the worker's error if the worker ends first."""
        accepting = asyncio.ensure_future(self.scheduler.accept())
        await asyncio.wait((accepting, self.worker), return_when=asyncio.FIRST_COMPLETED)
        if self.worker.done():
            accepting.cancel()
            self.worker.result()
        return await accepting


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    scheduler = FakeScheduler()
    server = await scheduler.start()
    settings = WorkerSettings(
        scheduler=f"127.0.0.1:{scheduler.port}",
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        threads=1,
        num_blocks=50,
        num_host_blocks=9,
        max_num_seqs=4,
        max_batched_tokens=64,
        drain_s=60.0,
        name="w",
    )
    stop = asyncio.Event()
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    worker = asyncio.create_task(run_worker(settings, stop, ready.set_result))
    yield Rig(scheduler, settings, stop, worker, ready)
    scheduler.reading.set()
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    await server.stop(0)


async def test_grammars_are_answered_over_the_link(rig: Rig) -> None:
    """This model has no tokenizer, so the refusal of a grammar says so."""
    link = await rig.accept()
    assert link.registration.prepares_grammars
    await link.send(grammars=GrammarOrders(prepare=[Grammar(id=5, grammar='start: "a"')], forget=[3]))
    while (message := await link.next()).WhichOneof("message") != "grammar":
        pass
    assert message.grammar == GrammarPrepared(id=5, refused=NO_TOKENIZER)


def slow_steps(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    launch = ModelRunner.launch

    def slow(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        time.sleep(step_s)
        launched = launch(self, plan)
        launched.started_us -= int(step_s * 1e6)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", slow)


async def test_a_worker_registers_runs_plans_and_is_released(rig: Rig) -> None:
    link = await rig.accept()
    registration = link.registration
    assert (registration.name, registration.block_size, registration.num_blocks) == ("w", 16, 50)
    assert (registration.num_host_blocks, registration.window) == (9, 3)
    assert (registration.max_num_seqs, registration.max_batched_tokens) == (4, 64)
    assert registration.model.vocab_size == 100
    assert registration.model.max_model_len == 256
    assert list(registration.model.eos_token_ids) == [7]
    assert len(registration.model.fingerprint) == 64

    await link.plan(1, **first_plan())
    for step in range(2, 6):
        await link.plan(step)
    results = [await link.result() for _ in range(5)]
    assert [r.step for r in results] == [1, 2, 3, 4, 5]
    assert all(len(r.token_ids) == 4 and not r.errors for r in results)

    rig.stop.set()
    while (await link.next()).WhichOneof("message") != "drain":
        pass
    # The worker runs plans until its release.
    await link.plan(6)
    assert (await link.result()).step == 6
    await link.release()
    await asyncio.wait_for(rig.worker, 20)


async def test_a_draft_row_gives_the_tokens_of_decode_rows(rig: Rig) -> None:
    link = await rig.accept()
    assert link.registration.verifies_drafts
    await link.plan(1, **first_plan())
    for step in range(2, 7):
        await link.plan(step)
    tokens = [np.frombuffer((await link.result()).token_ids, "<i4").item() for _ in range(6)]
    link.cut()
    link = await rig.accept()
    await link.plan(1, **first_plan())
    drafts = [tokens[1], tokens[2], (tokens[3] + 1) % 100]
    await link.plan(
        2, hold_slots=pack(0), draft_slots=pack(0), draft_counts=pack(3), draft_tokens=pack(*drafts)
    )  # fmt: skip
    await link.plan(3, resume_slots=pack(0))
    first, second, third = [await link.result() for _ in range(3)]
    assert (first.token_ids, first.draft_num_tokens) == (pack(tokens[0]), b"")
    assert (second.token_ids, second.draft_num_tokens) == (b"", pack(3))
    assert (second.draft_token_ids, third.token_ids) == (pack(*tokens[1:4]), pack(tokens[4]))


async def test_a_draft_row_of_a_decoding_slot_fails_the_link(rig: Rig) -> None:
    link = await rig.accept()
    await link.plan(1, **first_plan())
    await link.plan(2, draft_slots=pack(0), draft_counts=pack(0))
    failure = await link.failure()
    assert (failure.first_step, failure.last_step) == (2, 2)
    assert ": each slot must be held" in failure.message


async def test_health_and_metrics(rig: Rig) -> None:
    await rig.accept()
    addresses = await asyncio.wait_for(rig.ready, 20)
    assert addresses.grpc is not None
    async with grpc.aio.insecure_channel(addresses.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with httpx.AsyncClient(base_url=f"http://{addresses.metrics}", timeout=20) as client, asyncio.timeout(20):
        # The link is up here a little before the worker knows.
        while "paceline_worker_link_up 1.0" not in (text := (await client.get("/metrics")).text):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "paceline_worker_kv_blocks 50.0" in text


async def test_the_next_step_starts_while_the_last_result_is_still_unread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline: two plans are in flight, and the scheduler reads nothing until long after both have run."""
    slow_steps(monkeypatch, 0.1)
    done: list[int] = []
    result = LaunchedStep.result

    def told(launched: LaunchedStep) -> StepResult:
        done.append(launched.step)
        return result(launched)

    monkeypatch.setattr(LaunchedStep, "result", told)
    link = await rig.accept()
    await link.plan(1, **first_plan())
    assert (await link.result()).step == 1
    rig.scheduler.reading.clear()
    await link.plan(2)
    await link.plan(3)
    async with asyncio.timeout(20):
        while done != [1, 2, 3]:  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.01)
    # The inbox may have earlier heartbeats, but no result.
    rig.scheduler.reading.set()
    second, third = await link.result(), await link.result()
    assert second.finished_us <= third.started_us


async def test_heartbeats_go_on_during_a_long_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, goes_on = Decoder.forward, threading.Event()

    def waits(self: Decoder, *arguments: Any) -> Tensor:
        assert goes_on.wait(60)
        return forward(self, *arguments)

    monkeypatch.setattr(Decoder, "forward", waits)
    link = await rig.accept()
    await link.plan(1, **first_plan())
    for _ in range(4):  # the first one may be older than the step
        assert (await link.next()).WhichOneof("message") == "heartbeat"
    goes_on.set()
    assert (await link.result()).step == 1


async def test_after_a_cut_link_a_worker_registers_with_empty_slots_and_its_kept_blocks(rig: Rig) -> None:
    link = await rig.accept()
    await link.plan(1, **first_plan())
    first = await link.result()
    link.cut()
    again = await rig.accept()
    (kept,) = again.registration.kept
    (new,) = first_plan()["new_sequences"]
    assert kept.token_ids == new.token_ids + first.token_ids
    assert (kept.num_computed_tokens, kept.block_table) == (len(new.token_ids) // 4, new.block_table)
    again.registration.ClearField("kept")
    assert again.registration == link.registration
    assert link.registration.incarnation, "by which the scheduler recognizes the worker"
    # Slot 0 is free again, and steps count from 1. Otherwise this plan would break the link.
    await again.plan(1, **first_plan())
    assert (await again.result()).token_ids == first.token_ids


async def test_a_plan_that_breaks_the_contract_fails_the_link_and_nothing_else(rig: Rig) -> None:
    link = await rig.accept()
    await link.plan(1, prefill_slots=pack(3), prefill_tokens=pack(1))
    assert "ProtocolViolation: prefill_slots names a slot" in (await link.failure()).message
    again = await rig.accept()
    await again.plan(1, **first_plan())
    assert len((await again.result()).token_ids) == 4


def fail_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    forward, failed = Decoder.forward, list[bool]()

    def maybe(self: Decoder, *arguments: Any) -> Tensor:
        if not failed:
            failed.append(True)
            raise error
        return forward(self, *arguments)

    monkeypatch.setattr(Decoder, "forward", maybe)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("in a processor\nand more"), "ZeroDivisionError: in a processor"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
    ],
)
async def test_a_step_that_raises_is_reported_and_the_worker_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    link = await rig.accept()
    await link.plan(1, **first_plan())
    await link.result()
    fail_once(monkeypatch, error)
    await link.plan(2)
    await link.plan(3)
    failure = await link.failure()
    assert (failure.first_step, failure.last_step, failure.message) == (2, 2, message)
    again = await rig.accept()
    assert again.registration.incarnation != link.registration.incarnation
    again.registration.incarnation = link.registration.incarnation
    assert again.registration == link.registration
    await again.plan(1, **first_plan())
    assert len((await again.result()).token_ids) == 4


async def test_a_worker_that_loses_its_device_reports_the_step_and_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await rig.accept()

    def fail(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(Decoder, "forward", fail)
    await link.plan(1, **first_plan())
    assert "can't allocate memory" in (await link.failure()).message
    with pytest.raises(DeviceLost, match="can't allocate memory"):
        await asyncio.wait_for(rig.worker, 20)


async def test_a_step_that_hangs_is_reported_and_ends_the_worker(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    await rig.accept()
    hang, other = threading.Event(), FakeScheduler()
    server = await other.start()
    limits = {"step_deadline_s": 0.5, "step_deadline_token_s": 0.0, "first_step_deadline_s": 20.0}
    settings = rig.settings.model_copy(update={"scheduler": f"127.0.0.1:{other.port}", **limits})
    worker = asyncio.create_task(run_worker(settings, asyncio.Event()))
    try:
        link = await other.accept()
        await link.plan(1, **first_plan())
        await link.result()
        monkeypatch.setattr(Decoder, "forward", lambda *_: hang.wait())
        await link.plan(2)
        failure = await link.failure()
        assert (failure.first_step, failure.last_step, failure.message) == (2, 2, "not done after 0.5 s")
        with pytest.raises(StepOverdue):
            await asyncio.wait_for(worker, 20)
    finally:
        hang.set()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        await server.stop(0)


async def test_a_drain_that_takes_too_long_ends(rig: Rig) -> None:
    await rig.accept()
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(rig.settings.model_copy(update={"drain_s": 3.0}), stop))
    link = await rig.scheduler.accept()
    await link.plan(1, **first_plan())
    await link.result()
    began = time.monotonic()
    stop.set()
    await asyncio.wait_for(worker, 30)
    assert time.monotonic() - began > 2.5


async def test_a_worker_waits_for_a_scheduler_that_is_not_there_yet(rig: Rig, tmp_path: Path) -> None:
    """A second worker, on the same machine, pointed at a port where no scheduler listens until later."""
    await rig.accept()
    late = FakeScheduler()
    probe = await late.start()
    await probe.stop(0)
    settings = rig.settings.model_copy(update={"scheduler": f"127.0.0.1:{late.port}"})
    stop = asyncio.Event()
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    worker = asyncio.create_task(run_worker(settings, stop, ready.set_result))
    await asyncio.sleep(0.7)
    server = await late.start()
    try:
        link = await late.accept()
        assert (await asyncio.wait_for(ready, 20)) is not None
        assert not worker.done()
        stop.set()
        while (await link.next()).WhichOneof("message") != "drain":
            pass
        await link.release()
        await asyncio.wait_for(worker, 20)
        assert worker.exception() is None
    finally:
        await server.stop(0)


async def test_stop_without_a_link_ends_at_once(rig: Rig) -> None:
    settings = rig.settings.model_copy(update={"scheduler": "127.0.0.1:1", "drain_s": 60.0})
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(settings, stop))
    await asyncio.sleep(0.5)
    assert not worker.done(), "it goes on trying"
    stop.set()
    await asyncio.wait_for(worker, 20)
    assert worker.exception() is None


async def test_the_thread_that_builds_the_model_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise libgomp counts its threads, too, and the model's threads sleep at each barrier."""
    builders = SimpleQueue[threading.Thread]()

    def build(*args: Any) -> BuiltWorker:
        builders.put(threading.current_thread())
        return build_worker(*args)

    monkeypatch.setattr("gpu_worker.server.build_worker", build)
    settings = rig.settings.model_copy(update={"scheduler": "127.0.0.1:1"})
    worker = asyncio.create_task(run_worker(settings, asyncio.Event()))
    try:
        builder = await asyncio.to_thread(builders.get, timeout=30)
        await asyncio.to_thread(builder.join, 10)
        assert not builder.is_alive()
        assert not worker.done()
    finally:
        worker.cancel()
        await asyncio.wait([worker])


async def test_a_process_with_a_hung_step_ends_at_once_with_a_status_of_its_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        raise StepOverdue(7, 7, [], "not done after 60.0 s")

    ended: list[int] = []
    monkeypatch.setattr("gpu_worker.server.run_worker", hang)
    monkeypatch.setattr(os, "_exit", ended.append)
    await serve(rig.settings, asyncio.Event())
    assert ended == [exit_status.RESTART]


async def test_a_scheduler_with_an_older_fence_gets_no_step_run(rig: Rig) -> None:
    rig.scheduler.fence = 7
    link = await rig.accept()
    await link.plan(1, **first_plan())
    assert (await link.result()).step == 1
    rig.scheduler.fence = 6
    link.cut()
    zombie = await rig.accept()
    with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the worker may have left it already
        await zombie.plan(1, **first_plan())
    await asyncio.wait_for(zombie.lost.wait(), 20)
    while not zombie.inbox.empty():
        assert (await zombie.next()).WhichOneof("message") == "heartbeat"
    rig.scheduler.fence = 8
    while (link := await rig.accept()).fence != 8:  # a link from before the new fence
        pass
    assert [len(kept.token_ids) for kept in link.registration.kept] == [4 * 4]
    await link.plan(1, **first_plan())
    assert (await link.result()).step == 1
