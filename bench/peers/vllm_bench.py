"""vLLM's own V1 Scheduler on the workloads of bench/control_plane.py, without a model: jobs in, samples out (peer.py).

Runs in the environment that tests/peer/env.sh makes. Of Paceline it imports only tests/peer/vllm_driver.py and
quiet.py. The measured time is that of schedule() and update_from_output(), or of finish_requests() for an abort. For an
admission it also includes what vLLM's engine core does when a request comes: it makes the Request with its block hashes
and calls add_request(). It does not include pickling, msgpack, and making the model runner's output.
"""

# ruff: noqa: E402 - vLLM can be imported only after its settings are made

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
logging.disable(logging.WARNING)  # it warns for every scheduler that is made
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
ANSWERS, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "peer"))
sys.path.append(str(ROOT))

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.version import __version__
from vllm_driver import make_scheduler

from bench.peers.quiet import no_collections

BLOCK_SIZE = 16


class VllmBench:
    """vLLM's scheduler with the requests of a job."""

    def __init__(self, max_num_seqs: int, num_blocks: int, max_batched_tokens: int = 8192, priority: bool = False):
        self.scheduler = make_scheduler(
            {
                "preset": "vllm-v1-priority" if priority else "vllm-v1",
                "block_size": BLOCK_SIZE,
                "num_blocks": num_blocks,
                "max_num_seqs": max_num_seqs,
                "max_batched_tokens": max_batched_tokens,
                "max_model_len": 1 << 16,
            }
        )
        self.number = 0
        self.hashing_s = 0.0
        self._hash = get_request_block_hasher(BLOCK_SIZE, sha256)

    def request(self, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        self.number += 1
        return Request(
            request_id=str(self.number),
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(self.number),
            priority=priority,
            block_hasher=self._timed_hash,
        )

    def _timed_hash(self, request: Request) -> Any:
        began = time.perf_counter()
        hashes = self._hash(request)
        self.hashing_s += time.perf_counter() - began
        return hashes

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Returns one token for each request that has no token left to compute."""
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[99] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
        )

    def step(self) -> tuple[float, float]:
        """Seconds of schedule() and of update_from_output()."""
        began = time.perf_counter()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter()
        result = self.result(output)
        resulted = time.perf_counter()
        self.scheduler.update_from_output(output, result)
        return scheduled - began, time.perf_counter() - resulted


def decode(running: int, steps: int, warm_up: int, seed: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    bench = VllmBench(running, running * (2 + (64 + steps + 200) // BLOCK_SIZE))
    for _ in range(running):
        bench.scheduler.add_request(bench.request(rng.integers(1, 1 << 29, rng.integers(17, 64)).tolist(), 10_000))
    while bench.scheduler.waiting:
        bench.step()
    for _ in range(warm_up):
        bench.step()
    with no_collections():
        samples = [bench.step() for _ in range(steps)]
    return [{"step": schedule + update, "schedule": schedule, "update": update} for schedule, update in samples]


def prompts(prompt: int, cached: int, seed: int) -> Callable[[], list[int]]:
    """Returns a function that makes prompts with the same beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 1 << 29, cached).tolist()
    return lambda: shared + rng.integers(1, 1 << 29, prompt - cached).tolist()


def burst(prompt: int, cached: int, requests: int, seed: int) -> list[dict[str, float]]:
    """Requests for one token each, all at once, until the last one has ended. Seconds per request, as one sample."""
    bench, make = VllmBench(4096, 400_000), prompts(prompt, cached, seed)
    for _ in range(20):
        bench.scheduler.add_request(bench.request(make(), 1))
        bench.step()
    waiting = [make() for _ in range(requests)]
    bench.hashing_s = 0.0

    def run() -> float:
        began = time.perf_counter()
        for tokens in waiting:
            bench.scheduler.add_request(bench.request(tokens, 1))
        whole = time.perf_counter() - began
        while bench.scheduler.has_unfinished_requests():
            whole += sum(bench.step())
        return whole

    with no_collections():
        whole = run()
    return [{"whole": whole / requests, "hashing": bench.hashing_s / requests}]


def lone(prompt: int, cached: int, times: int, seed: int) -> list[dict[str, float]]:
    bench, make = VllmBench(4096, 400_000), prompts(prompt, cached, seed)

    def one() -> dict[str, float]:
        tokens = make()
        bench.hashing_s = 0.0
        began = time.perf_counter()
        request = bench.request(tokens, 1)
        bench.scheduler.add_request(request)
        added = time.perf_counter()
        hashing = bench.hashing_s
        schedule, update = bench.step()
        admitted = added - began + schedule
        return {"admission": admitted, "hashing": hashing, "schedule": schedule, "whole": admitted + update}

    for _ in range(20):
        one()
    with no_collections():
        return [one() for _ in range(times)]


def abort(waiting: int, times: int, order: str, seed: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    bench = VllmBench(1, 100_000, priority=order == "priority")
    bench.scheduler.add_request(bench.request(rng.integers(1, 1 << 29, 32).tolist(), 30_000, -10))
    bench.step()
    for _ in range(waiting):
        prompt, priority = rng.integers(1, 1 << 29, 32).tolist(), -int(rng.integers(5))
        bench.scheduler.add_request(bench.request(prompt, 64, priority))
    names = [str(i) for i in rng.permutation(np.arange(2, waiting + 2))[:times].tolist()]

    def one(name: str) -> dict[str, float]:
        began = time.perf_counter()
        bench.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        return {"abort": time.perf_counter() - began}

    with no_collections():
        return [one(name) for name in names]


def main() -> None:
    jobs: dict[str, Callable[..., Any]] = {
        "decode": decode,
        "burst": burst,
        "lone": lone,
        "abort": abort,
        "version": lambda: __version__,
    }
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(jobs[job.pop("what")](**job)), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
