"""Many workers that compute nothing, in one process: each takes a fixed time a step and returns the right number of
tokens over a real link.

    python -m bench.null_workers SCHEDULER NUM_WORKERS ROWS STEP_MS
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc.aio
import numpy as np
import uvloop

from paceline.v1.common_pb2 import ModelInfo
from paceline.v1.worker_pb2 import (
    Heartbeat,
    StepPlan,
    StepResult,
    WorkerRegistration,
    WorkerServiceLinkRequest,
    WorkerServiceLinkResponse,
)
from paceline.v1.worker_pb2_grpc import WorkerServiceStub

BLOCK_SIZE, BLOCKS_PER_ROW, MAX_BATCHED_TOKENS = 16, 80, 8192
BEAT_S = 0.25
TOKEN = np.array([99], np.int32).tobytes()


class Rows:
    """Which slots decode, and how many tokens each prefill still lacks. This is enough to count a step's tokens."""

    def __init__(self, num_slots: int) -> None:
        self.decoding = np.zeros(num_slots, bool)
        self.paused = np.zeros(num_slots, bool)
        self.missing = np.zeros(num_slots, np.int64)

    def sampled(self, plan: StepPlan) -> int:
        """Applies the plan; returns how many tokens its step samples."""
        if plan.free_slots:
            freed = np.frombuffer(plan.free_slots, np.int32)
            self.decoding[freed] = self.paused[freed] = False
        for sequence in plan.new_sequences:
            self.missing[sequence.slot] = len(sequence.token_ids) // 4 - sequence.num_cached_tokens
        if plan.hold_slots:
            self.paused[np.frombuffer(plan.hold_slots, np.int32)] = True
        if plan.resume_slots:
            self.paused[np.frombuffer(plan.resume_slots, np.int32)] = False
        count = 0 if plan.skip_decodes else int(np.count_nonzero(self.decoding & ~self.paused))
        if plan.prefill_slots:
            slots = np.frombuffer(plan.prefill_slots, np.int32)
            self.missing[slots] -= np.frombuffer(plan.prefill_tokens, np.int32)
            ended = slots[self.missing[slots] == 0]
            self.decoding[ended] = True
            count += len(ended)
        return count


async def serve(channel: grpc.aio.Channel, name: str, num_rows: int, step_s: float) -> None:
    """One worker. Raises ConnectionError when its link ends."""
    registration = WorkerRegistration(
        name=name,
        model=ModelInfo(name="null", fingerprint="null", vocab_size=1 << 20, max_model_len=1 << 16),
        block_size=BLOCK_SIZE,
        num_blocks=num_rows * BLOCKS_PER_ROW,
        max_num_seqs=num_rows,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        heartbeats=True,
        incarnation=name,
    )
    call = cast(Any, WorkerServiceStub(channel)).Link(wait_for_ready=True)
    await call.write(WorkerServiceLinkRequest(registration=registration))
    rows, results = Rows(num_rows), asyncio.Queue[WorkerServiceLinkRequest]()
    free_s = 0.0  # when the last plan that has arrived will be done
    received = sent = 0  # plans, and results
    loop = asyncio.get_running_loop()

    async def write() -> None:
        nonlocal sent
        while True:
            message = await results.get()
            sent = message.result.step or sent
            await call.write(message)

    async def beat() -> None:
        while True:
            heartbeat = Heartbeat(step=sent, received=received, allowed_s=10.0)
            results.put_nowait(WorkerServiceLinkRequest(heartbeat=heartbeat))
            await asyncio.sleep(BEAT_S)

    def deliver(result: StepResult) -> None:
        time.sleep(max(0.0, result.finished_us * 1e-6 - time.monotonic()))
        loop.call_soon_threadsafe(results.put_nowait, WorkerServiceLinkRequest(result=result))

    # Timers of the event loop are up to 1 ms late, so a thread waits for the end of each step.
    device = ThreadPoolExecutor(1)
    tasks = [asyncio.create_task(write()), asyncio.create_task(beat())]
    try:
        while isinstance(message := await call.read(), WorkerServiceLinkResponse):  # else the end
            if message.WhichOneof("message") != "plan":
                continue
            plan = message.plan
            received = plan.step
            begins_s = max(free_s, time.monotonic())
            free_s = begins_s + step_s
            result = StepResult(
                step=plan.step,
                token_ids=TOKEN * rows.sampled(plan),
                started_us=int(begins_s * 1e6),
                finished_us=int(free_s * 1e6),
            )
            device.submit(deliver, result)
    finally:
        device.shutdown(wait=False, cancel_futures=True)
        for task in tasks:
            task.cancel()
    raise ConnectionError(f"{name}: {(await call.code()).name} {await call.details()}")


async def main(scheduler: str, num_workers: int, num_rows: int, step_ms: float) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each worker, as separate machines have
    channels = [grpc.aio.insecure_channel(scheduler, options=options) for _ in range(num_workers)]
    await asyncio.gather(*(serve(channel, f"null-{i}", num_rows, step_ms / 1000) for i, channel in enumerate(channels)))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
