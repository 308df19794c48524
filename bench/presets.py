"""Every preset under the same load: the real cores on a virtual clock, with the step times of an H200.

    python -m bench.presets            # a table, and bench/results/presets.json

The load is made up from a seed: Poisson arrivals, log-normal lengths as in public chat traces, a third of the prompts
with one of 20 system prompts. The pool is kept so small that presets differ. A step costs 4.6 ms, plus 38 us for each
sequence that decodes, plus 21 us for each prompt token: Llama-3.1-8B on an H200, from the kernel sums that NVIDIA's
aiconfigurator ships. The device is only a model, so the results compare the presets' decisions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cache_svc.core.cache import CacheCore
from paceline.v1.common_pb2 import ModelInfo, SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, SessionResponse, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.scenario import NullWorker, Scheduled

RESULTS = Path(__file__).parent / "results" / "presets.json"
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 16, 6_000, 256, 8_192
STEP_S, DECODE_S, PREFILL_TOKEN_S = 4.6e-3, 38e-6, 21e-6
NUM_REQUESTS = 1_000


@dataclass(slots=True)
class Arrival:
    """A request of the load, and when its tokens came."""

    at_s: float
    prompt: np.ndarray
    max_tokens: int
    token_times_s: list[float] = field(default_factory=list)


def load(rate_per_s: float) -> list[Arrival]:
    """The arrivals. They are the same for every preset."""
    rng = np.random.default_rng(0)
    systems = [rng.integers(1, 1 << 29, rng.integers(200, 600)) for _ in range(20)]
    times = rng.exponential(1 / rate_per_s, NUM_REQUESTS).cumsum()
    arrivals = []
    for at_s in times.tolist():
        own = rng.integers(1, 1 << 29, int(np.clip(rng.lognormal(6.3, 0.9), 8, 6_000)))
        shared = systems[int(rng.integers(20))] if rng.random() < 1 / 3 else own[:0]
        max_tokens = int(np.clip(rng.lognormal(5.3, 0.8), 4, 1_500))
        arrivals.append(Arrival(at_s, np.concatenate((shared, own)).astype(np.int32), max_tokens))
    return arrivals


class Replay:
    """One worker with at most one step in flight. Every request ends at its length."""

    def __init__(self, preset: str, arrivals: list[Arrival]) -> None:
        # TensorRT-LLM's presets need chunked prefill for prompts beyond the budget, so all presets get it.
        policies = build(choose(preset, options={"chunked_prefill": True}))
        config = SchedulerConfig(window=1, max_queued_requests=1 << 30, max_queued_tokens=1 << 60)
        self.core = SchedulerCore(config, policies, lambda: build(choose()), epoch=1)
        self.cache, self.device = CacheCore(), NullWorker()
        self.core.open_session("s", 1 << 30)
        self.core.cache_connected(1)
        registration = WorkerRegistration(
            model=ModelInfo(name="null", fingerprint="null", vocab_size=(1 << 31) - 1, max_model_len=1 << 16),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_NUM_SEQS,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        self.worker = self.core.register_worker(registration)
        self.arrivals, self.now_s, self.num_in = arrivals, 0.0, 0
        self.handles: list[int] = []
        self.plan: StepPlan | None = None
        self.computed = self.steps = 0

    def run(self) -> None:
        while True:
            self._submit()
            self._settle()
            if self.plan is not None:
                scheduled, result = self.device.run(self.plan)
                self._pass_time(scheduled)
                self._finish(result)
            elif self.num_in < len(self.arrivals):
                self.now_s = max(self.now_s, self.arrivals[self.num_in].at_s)
            else:
                return

    def _submit(self) -> None:
        while self.num_in < len(self.arrivals) and self.arrivals[self.num_in].at_s <= self.now_s:
            arrival, self.num_in = self.arrivals[self.num_in], self.num_in + 1
            sampling = SamplingParams(max_tokens=arrival.max_tokens, top_p=1.0, ignore_eos=True)
            prompt = arrival.prompt.tobytes()
            submission = Submission(
                handle=self.num_in, request_id=str(self.num_in), prompt_token_ids=prompt, sampling=sampling
            )
            self.core.session_message("s", SessionRequest(submissions=[submission]), arrival.at_s)

    def _settle(self) -> None:
        while True:
            outbox = self.core.poll(self.now_s)
            for _, message in outbox.to_workers:
                self.plan = message.plan if message.HasField("plan") else self.plan
            for _, response in outbox.to_sessions:
                self._take(response)
            if not outbox.to_cache:
                return
            for exchange in outbox.to_cache:
                self.core.cache_response(self.cache.exchange(exchange))

    def _pass_time(self, scheduled: list[Scheduled]) -> None:
        prefill = sum(row.tokens for row in scheduled if row.phase == "prefill")
        decodes = sum(row.phase == "decode" for row in scheduled)
        self.now_s += STEP_S + DECODE_S * decodes + PREFILL_TOKEN_S * prefill
        self.computed += prefill
        self.steps += 1

    def _finish(self, result: StepResult) -> None:
        self.plan = None
        self.core.worker_result(self.worker, result)

    def _take(self, response: SessionResponse) -> None:
        self.handles = list(response.handles) or self.handles
        for handle in self.handles if response.handles or response.same_handles else ():
            self.arrivals[handle - 1].token_times_s.append(self.now_s)

    def row(self, preset: str) -> dict[str, Any]:
        done = [a for a in self.arrivals if len(a.token_times_s) == a.max_tokens]
        ttft = [a.token_times_s[0] - a.at_s for a in done]
        gaps = [gap for a in done for gap in np.diff(a.token_times_s).tolist()]
        tokens = sum(len(a.token_times_s) for a in self.arrivals)
        return {
            "preset": preset,
            "finished": len(done),
            "duration_s": self.now_s,
            "output_tokens_per_s": tokens / self.now_s,
            "ttft_p50_s": float(np.percentile(ttft, 50)),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "itl_p50_ms": 1e3 * float(np.percentile(gaps, 50)),
            "itl_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
            "preempted": self.core.counters.preempted,
            "prefill_tokens": self.computed,
            "cached_tokens": self.cache.counters.prefix_hit_tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[8.0, 16.0, 24.0], help="requests a second")
    rates, console = parser.parse_args().rates, Console(width=110)
    rows = []
    for rate in rates:
        table = Table(title=f"{rate:g} requests/s, pool of {NUM_BLOCKS * BLOCK_SIZE:,} tokens")
        for name in ("preset", "out tok/s", "TTFT p50 / p99 s", "ITL p50 / p99 ms", "preempted", "prefill Mtok"):
            table.add_column(name, justify="left" if name == "preset" else "right")
        for preset in PRESETS:
            replay = Replay(preset, load(rate))
            replay.run()
            row = {"rate_per_s": rate, **replay.row(preset)}
            rows.append(row)
            table.add_row(
                preset,
                f"{row['output_tokens_per_s']:,.0f}",
                f"{row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.2f}",
                f"{row['itl_p50_ms']:.1f} / {row['itl_p99_ms']:.1f}",
                str(row["preempted"]),
                f"{row['prefill_tokens'] / 1e6:.2f}",
            )
        console.print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    result = {"num_requests": NUM_REQUESTS, "num_blocks": NUM_BLOCKS, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
