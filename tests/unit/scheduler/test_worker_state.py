"""What the scheduler reads off its record of a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import WorkerRegistration
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.batch import Batch
from scheduler_svc.core.workers.slots import SlotLedger
from scheduler_svc.core.workers.state import WorkerState
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker


def request(arrival_index: int) -> Request:
    return cast(Request, SimpleNamespace(arrival_index=arrival_index))


def test_a_refusal_holds_until_a_sequence_leaves() -> None:
    registration = WorkerRegistration(num_blocks=8, block_size=4, max_num_seqs=2, max_batched_tokens=16)
    worker = WorkerState(1, registration, window=2, batch=Batch(SlotLedger(2, 4)), available_blocks=8)
    worker.refuse(request(1))
    assert worker.has_refused(request(1))
    worker.batch.num_departed += 1
    assert not worker.has_refused(request(1))
    worker.refuse(request(2))
    worker.refuse(request(3))
    assert worker.has_refused(request(2))
    assert not worker.has_refused(request(1))


def test_a_sequence_with_all_its_blocks_takes_no_more() -> None:
    """A prompt of 5 tokens and 7 output tokens need 3 blocks: 1 is promised while the sequence holds 2, none later."""
    system = LocalSystem(SchedulerConfig(window=1))
    system.open("s")
    system.submit("s", 1, [1, 2, 3, 4, 5], SamplingParams(top_p=1.0, max_tokens=7, seed=1, ignore_eos=True))
    system.attach(ToyWorker(block_size=4, num_blocks=8, max_num_seqs=2, max_batched_tokens=16))
    [worker] = system.scheduler.workers.values()
    promised = []
    while moves := system.moves():
        if worker.batch.running:
            slot = next(iter(worker.batch.running))
            promised.append((int(worker.batch.slots.capacity[slot]), worker.batch.promised_blocks()))
        system.move(*moves[0])
    assert set(promised) == {(8, 1), (12, 0)}
