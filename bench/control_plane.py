"""What the control plane itself costs: the cores of scheduler and cache in one process, with a worker that computes
nothing. `make bench` prints the tables and writes bench/results/control_plane.json; beside it vLLM's Scheduler and
SGLang's order policies in environments of their own, if those are there (tests/peer/).

A decode step is everything from a step's result to the next plan: results taken in, tokens to the sessions, commits and
extensions exchanged with the cache (its time counts), the next plan made, and all protobuf messages built and parsed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cache_svc.core.cache import CacheCore
from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.common_pb2 import ModelInfo, SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.registry import build, choose, find, names

BLOCK_SIZE = 16
RUNNING = (64, 256, 1024, 4096)
WAITING = (128, 1_000, 5_000)
ADMISSIONS = 200
ABORTS = 500


class Bench:
    """One session, one worker, one cache; messages are serialised and parsed as on the wire."""

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
        self.worker = self.core.register_worker(registration, 0.0)
        self.handle = 0
        self.scheduler_s = self.cache_s = 0.0
        self.plan: StepPlan | None = None
        self.num_decoding = 0
        self.settle()

    def submit(self, prompts: list[np.ndarray], max_tokens: int) -> None:
        submissions = []
        for prompt in prompts:
            self.handle += 1
            submissions.append(
                Submission(
                    handle=self.handle,
                    request_id=str(self.handle),
                    prompt_token_ids=prompt.astype(np.int32).tobytes(),
                    sampling=SamplingParams(max_tokens=max_tokens, top_p=1.0, ignore_eos=True),
                )
            )
        message = SessionRequest(submissions=submissions).SerializeToString()
        self.timed(lambda: self.core.session_message("bench", SessionRequest.FromString(message), 0.0))

    def timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self.scheduler_s += time.perf_counter() - began
        return result

    def settle(self) -> None:
        """Until neither core has anything to say."""
        while True:
            plans, exchanges = self.timed(self._poll)
            for plan in plans:
                self.plan = StepPlan.FromString(plan)
            if not exchanges:
                return
            for exchange in exchanges:
                began = time.perf_counter()
                answer = self.cache.exchange(CacheServiceLinkRequest.FromString(exchange)).SerializeToString()
                self.cache_s += time.perf_counter() - began
                self.timed(partial(self._answer, answer))

    def _answer(self, answer: bytes) -> None:
        self.core.cache_response(CacheServiceLinkResponse.FromString(answer))

    def _poll(self) -> tuple[list[bytes], list[bytes]]:
        outbox = self.core.poll(0.0)
        for _, message in outbox.to_sessions:
            message.SerializeToString()
        plans = [m.plan.SerializeToString() for _, m in outbox.to_workers if m.HasField("plan")]
        return plans, [message.SerializeToString() for message in outbox.to_cache]

    def run_step(self) -> None:
        """The worker's part: as many tokens as the plan makes, at once."""
        assert self.plan is not None
        step = self.core.workers[self.worker].in_flight[0]
        tokens = np.full(step.num_sampled, 99, np.int32).tobytes()
        result = StepResult(step=self.plan.step, token_ids=tokens).SerializeToString()
        self.plan = None
        self.timed(lambda: self.core.worker_result(self.worker, StepResult.FromString(result), 0.0))
        self.settle()

    def measure(self, call: Callable[[], None], times: int) -> tuple[list[float], list[float]]:
        """Microseconds of the scheduler and of the cache, for each call."""
        scheduler, cache = [], []
        for _ in range(times):
            self.scheduler_s = self.cache_s = 0.0
            call()
            scheduler.append(self.scheduler_s * 1e6)
            cache.append(self.cache_s * 1e6)
        return scheduler, cache


def steady_decode(running: int, steps: int) -> dict[str, float]:
    """Sequences at random places in their blocks, none arriving or leaving."""
    prompts = np.random.default_rng(0)
    blocks = running * (2 + (64 + steps + 200) // BLOCK_SIZE)
    bench = Bench(running, blocks, max_batched_tokens=max(8192, running))
    bench.submit([prompts.integers(1, 1 << 29, prompts.integers(17, 64)) for _ in range(running)], 10_000)
    bench.settle()
    while len(bench.core.queue) or bench.core.workers[bench.worker].prefills:
        bench.run_step()
    for _ in range(20):
        bench.run_step()
    scheduler, cache = bench.measure(bench.run_step, steps)
    total = [a + b for a, b in zip(scheduler, cache, strict=True)]
    return {
        "running": running,
        "step_us_median": statistics.median(total),
        "step_us_p99": float(np.percentile(total, 99)),
        "scheduler_us_median": statistics.median(scheduler),
        "cache_us_median": statistics.median(cache),
    }


def admission() -> dict[str, float]:
    """A request of 3,000 tokens, the first 2,000 of which are cached: from its submission to the plan that runs it."""
    rng = np.random.default_rng(0)
    bench = Bench(4096, 400_000, max_batched_tokens=8192)
    shared = rng.integers(1, 1 << 29, 2_000)

    def one() -> None:
        bench.submit([np.concatenate((shared, rng.integers(1, 1 << 29, 1_000)))], 1)
        bench.settle()

    def whole() -> None:
        one()
        bench.run_step()

    whole()
    scheduler, cache = [], []
    for _ in range(ADMISSIONS):
        own, theirs = bench.measure(one, 1)
        scheduler += own
        cache += theirs
        bench.run_step()
    total = [a + b for a, b in zip(scheduler, cache, strict=True)]
    return {
        "prompt_tokens": 3000,
        "cached_tokens": 2000,
        "us_median": statistics.median(total),
        "scheduler_us_median": statistics.median(scheduler),
        "cache_us_median": statistics.median(cache),
    }


def abort(waiting: int = 10_000) -> dict[str, float]:
    """Cancels of requests anywhere in a queue of 10,000 behind a worker that is full."""
    rng = np.random.default_rng(0)
    bench = Bench(1, 100_000)
    bench.submit([rng.integers(1, 1 << 29, 32)], 100_000)
    bench.settle()
    bench.submit([rng.integers(1, 1 << 29, 32) for _ in range(waiting)], 64)
    bench.settle()
    handles = iter(rng.permutation(np.arange(2, waiting + 2))[:ABORTS].tolist())

    def one() -> None:
        message = SessionRequest(cancels=[next(handles)]).SerializeToString()
        bench.timed(lambda: bench.core.session_message("bench", SessionRequest.FromString(message), 0.0))
        bench.settle()

    scheduler, cache = bench.measure(one, ABORTS)
    total = [a + b for a, b in zip(scheduler, cache, strict=True)]
    return {"waiting": waiting, "us_median": statistics.median(total), "us_p99": float(np.percentile(total, 99))}


def order_cost() -> list[dict[str, Any]]:
    """A pass: the first 16 in order, once 1 % of the waiting has been replaced and 1 % has another match."""
    rows = []
    for name in sorted(names("order")):
        for waiting in WAITING:
            rng = np.random.default_rng(0)
            policy = find("order", name)()
            requests = [RequestView(_waiting_request(rng, i)) for i in range(waiting)]
            for request in requests:
                policy.add(request)
            times = []
            for _ in range(20):
                changed = rng.choice(waiting, max(1, waiting // 100), replace=False).tolist()
                began = time.perf_counter()
                for i in changed:
                    policy.rematched(requests[i])
                for _, request in zip(range(16), policy.ordered(0.0), strict=False):
                    assert request
                times.append((time.perf_counter() - began) * 1e6)
            rows.append({"order": name, "waiting": waiting, "us_median": statistics.median(times)})
    return rows


def _waiting_request(rng: np.random.Generator, i: int) -> Request:
    from paceline.v1.cache_pb2 import WorkerMatch

    family = int(rng.integers(16))
    prompt = np.concatenate((np.arange(512) + 1000 * family, rng.integers(1, 1 << 29, 128))).astype(np.int32)
    request = Request(
        seniority=i,
        session_id="",
        handle=i,
        request_id=str(i),
        prompt=prompt.tobytes(),
        output=bytearray(),
        sampling=SamplingParams(max_tokens=int(rng.integers(1, 512))),
        arrival_s=float(i),
        priority=float(rng.integers(5)),
        tenant=f"tenant-{i % 10}",
        place=i,
    )
    request.matches = {1: WorkerMatch(worker=1, num_tokens=int(rng.integers(0, 33)) * BLOCK_SIZE)}
    return request


def measure() -> dict[str, Any]:
    gc.collect()
    return {
        "block_size": BLOCK_SIZE,
        "decode": [steady_decode(running, 200 if running <= 1024 else 60) for running in RUNNING],
        "admission": admission(),
        "abort": abort(),
        "order": order_cost(),
    }
