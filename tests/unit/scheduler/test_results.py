"""How the scheduler reads a step's result, with a minimal fake worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paceline.v1.worker_pb2 import RowError, SlotEmbedding, StepResult
from scheduler_svc.core.lifecycle.beam_groups import BeamGroups
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.output.sessions import Publisher
from scheduler_svc.core.step.drafting import Drafting
from scheduler_svc.core.step.results import ResultReader
from scheduler_svc.core.step.step_log import StepLog
from scheduler_svc.core.step.trace_log import TraceLog
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.step_time import StepTimeFit


class Rows:
    """One decoding sequence, in slot 0."""

    session = -1
    slots, generations = np.array([0]), np.array([1])
    handles, sessions = np.array([7]), np.array([0])

    def __len__(self) -> int:
        return 1


def reader(published: list[int], fail: Callable[[Any, str, int], None] | None = None) -> ResultReader:
    def no(*_: object) -> None:
        raise AssertionError("not expected")

    life = SimpleNamespace(end=no, invalidate_kv=no, fail=fail or no)
    publisher = SimpleNamespace(
        tokens=lambda _session, _sessions, handles, _tokens: published.extend(handles.tolist()),
        score=no,
        prompt_scores=no,
    )
    groups = SimpleNamespace(report=no)
    return ResultReader(
        cast(Lifecycle, life),
        cast(Publisher, publisher),
        cast(BeamGroups, groups),
        Drafting(cast(Lifecycle, life)),
        StepLog(),
        TraceLog(),
    )


@pytest.mark.parametrize(("number", "counts"), [(1, False), (2, True)])
def test_each_step_after_the_first_of_a_link_counts_for_the_workers_speed(number: int, counts: bool) -> None:
    step = SimpleNamespace(
        step=number, new_tokens=500, context_tokens=0, num_rows=1, num_sampled=0, rows=[], chunks=[], drafts=()
    )
    batch = SimpleNamespace(slots=None)
    worker = SimpleNamespace(in_flight=deque([step]), step_fit=StepTimeFit(), batch=batch, pools=False, may_draft=False)
    result = StepResult(step=number, started_us=1, finished_us=50_001)
    reader([]).apply(cast(WorkerState, worker), result, 0.0)
    assert worker.step_fit.is_new is not counts
    if counts:
        assert worker.step_fit.time.of(500, 0, 1) == pytest.approx(0.05, rel=0.1)


def test_a_decode_that_failed_is_reported_and_gives_no_token() -> None:
    failed, published = list[object](), list[int]()
    slots = SimpleNamespace(generation=np.array([1]), num_releases=0, write_tokens=lambda *_: None, extra_stops={})
    step = SimpleNamespace(step=2, num_sampled=1, rows=Rows(), chunks=[], drafts=(), num_releases=0, decode_step=1)
    batch = SimpleNamespace(slots=slots, running={0: "it"}, finishing=set())
    worker = SimpleNamespace(in_flight=deque([step]), batch=batch, eos_token_ids=(), pools=False, may_draft=False)

    def fail(request: object, message: str, code: int) -> None:
        failed.append((request, message, code))
        slots.generation[0] += 1  # its slot is free again
        slots.num_releases += 1

    result = StepResult(step=2, token_ids=bytes(4), errors=[RowError(slot=0, message="broken", code=3)])
    assert reader(published, fail).apply(cast(WorkerState, worker), result, 0.0) == 0
    assert failed == [("it", "broken", 3)]
    assert published == []


def test_the_vector_of_a_whole_input_ends_its_request() -> None:
    ended, vectors = list[object](), list[bytes]()
    request = SimpleNamespace(trace=None, history=SimpleNamespace(first_token_s=None))
    chunk = SimpleNamespace(slot=3, generation=1, samples=True)
    step = SimpleNamespace(step=2, num_sampled=0, rows=[], chunks=[chunk], drafts=())
    batch = SimpleNamespace(slots=SimpleNamespace(generation=[0, 0, 0, 1]), running={3: request})
    worker = SimpleNamespace(in_flight=deque([step]), batch=batch, pools=True, may_draft=False)
    read = replace(
        reader([]),
        life=cast(Lifecycle, SimpleNamespace(end=lambda one, _reason: ended.append(one))),
        publisher=cast(Publisher, SimpleNamespace(embedding=lambda _request, values: vectors.append(values))),
    )
    result = StepResult(step=2, embeddings=[SlotEmbedding(slot=3, values=b"1234")])
    assert read.apply(cast(WorkerState, worker), result, now_s=7.0) == 1
    assert (ended, vectors, request.history.first_token_s) == ([request], [b"1234"], 7.0)
