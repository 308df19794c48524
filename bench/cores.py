"""The cores of scheduler and cache in one process, with a worker that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cache_svc.core.cache import CacheCore
from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.common_pb2 import ModelInfo, SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import Outbox, SchedulerConfig
from scheduler_svc.policies.registry import build, choose

BLOCK_SIZE = 16
T = TypeVar("T")
Sample = dict[str, float]  # seconds of "scheduler", "cache" and "wire"


def new_sample() -> Sample:
    return {"scheduler": 0.0, "cache": 0.0, "wire": 0.0}


class Bench:
    """One session, one worker with a window of 1, one cache.

    It measures the calls that the servers make to the two cores ("scheduler", "cache"). It measures separately ("wire")
    the serialising and parsing of every message that the two services send and receive. The time in which gateway and
    worker make and read their messages is not measured.
    """

    def __init__(self, max_num_seqs: int, num_blocks: int, max_batched_tokens: int = 8192, preset: str = "") -> None:
        config = SchedulerConfig(window=1, max_queued_requests=1 << 30, max_queued_tokens=1 << 60)
        self.core = SchedulerCore(config, build(choose(preset)), lambda: build(choose()), epoch=1)
        self.cache = CacheCore()
        self.core.open_session("bench", 1 << 30)
        self.core.cache_connected(1)
        registration = WorkerRegistration(
            model=ModelInfo(name="null", fingerprint="null", vocab_size=1 << 30, max_model_len=1 << 20),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
        )
        self.worker = self.core.register_worker(registration)
        self.handle = 0
        self.sample = new_sample()
        self.plan: StepPlan | None = None
        self.settle()

    def timed(self, what: str, call: Callable[..., T], *args: Any) -> T:
        began = time.perf_counter()
        result = call(*args)
        self.sample[what] += time.perf_counter() - began
        return result

    def measured(self, call: Callable[..., None], *args: Any) -> Sample:
        self.sample = new_sample()
        call(*args)
        return self.sample

    # ── gateway and worker ───────────────────────────────────────────────────────────────────────────────────────────

    def submission(self, prompt: npt.NDArray[np.int64], max_tokens: int, priority: float = 0.0) -> bytes:
        self.handle += 1
        submission = Submission(
            handle=self.handle,
            request_id=str(self.handle),
            prompt_token_ids=prompt.astype(np.int32).tobytes(),
            sampling=SamplingParams(max_tokens=max_tokens, top_p=1.0, ignore_eos=True),
            priority=priority,
        )
        return SessionRequest(submissions=[submission]).SerializeToString()

    def cancel(self, handle: int) -> bytes:
        return SessionRequest(cancels=[handle]).SerializeToString()

    def take_in(self, message: bytes) -> None:
        """The scheduler receives a session's message, and sends nothing yet."""
        request = self.timed("wire", SessionRequest.FromString, message)
        self.timed("scheduler", self.core.session_message, "bench", request, 0.0)

    def send(self, message: bytes) -> None:
        """The scheduler receives a session's message, and both cores handle all messages that follow from it."""
        self.take_in(message)
        self.settle()

    def run_step(self) -> None:
        """The worker returns the plan's tokens at once, and both cores handle all messages that follow from them."""
        assert self.plan is not None
        step = self.core.workers[self.worker].in_flight[0]
        tokens = np.full(step.num_sampled, 99, np.int32).tobytes()
        began_us = 10_000 * self.plan.step  # on a worker's clock; the scheduler learns step times from these
        took_us = 5_000 + 20 * step.new_tokens + 10 * step.num_rows
        result = StepResult(step=self.plan.step, token_ids=tokens, started_us=began_us, finished_us=began_us + took_us)
        message = result.SerializeToString()
        self.plan = None
        result = self.timed("wire", StepResult.FromString, message)
        self.timed("scheduler", self.core.worker_result, self.worker, result)
        self.settle()

    # ── scheduler and cache ──────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Runs until neither core has a message to send."""
        while True:
            outbox = self.timed("scheduler", self.core.poll, 0.0)
            exchanges = self.timed("wire", self._serialise, outbox)
            if not exchanges:
                return
            for exchange in exchanges:
                request = self.timed("wire", CacheServiceLinkRequest.FromString, exchange)
                answer = self.timed("cache", self.cache.exchange, request)
                message = self.timed("wire", answer.SerializeToString)
                response = self.timed("wire", CacheServiceLinkResponse.FromString, message)
                self.timed("scheduler", self.core.cache_response, response)

    def _serialise(self, outbox: Outbox) -> list[bytes]:
        for _, response in outbox.to_sessions:
            response.SerializeToString()
        for _, message in outbox.to_workers:
            message.SerializeToString()
            if message.HasField("plan"):
                self.plan = message.plan
        return [request.SerializeToString() for request in outbox.to_cache]
