"""vLLM's own V1 Scheduler, without a model, on scenarios (docs/scenarios.md): one JSON object a line in, one out.

Runs in the environment that tests/peer/env.sh makes, and imports nothing of Paceline. Scheduler and KVCacheManager are
vLLM's; what the model runner would return is made up here. Asynchronous scheduling is off: each step is decided after
the results of the previous step are known, as in `paceline scenario`.

How the fields are read off vLLM:
  tokens          SchedulerOutput.num_scheduled_tokens
  cached_tokens   num_computed_tokens with which a new or resumed request comes; 0 in its later steps
  phase           decode if the step computes only the last sampled token of a request that ran in the step before;
                  prefill otherwise. A request's last prefill step samples a token.
  free_blocks     free blocks without a content hash; cached_blocks: free blocks with one (vLLM keeps one list of both)
  priority        negated: in vLLM the smaller number goes first
A run with nothing scheduled for 20 steps in a row, and no request left to arrive, is cut off and marked "stuck".

The output also has the findings of vllm_watch.py. For "store_after_step": true in the input see Watch.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from prompts import prompts
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_watch import Watch

MODEL = str(Path(__file__).resolve().parents[2] / "demo" / "checkpoint")  # any model: only its config is read
MAX_IDLE_STEPS = 20

init_none_hash(sha256)


def make_scheduler(scenario: dict[str, Any]) -> Scheduler:
    options = scenario.get("options", {})
    block_size, num_blocks = scenario["block_size"], scenario["num_blocks"] + 1  # one is vLLM's null block
    max_model_len = scenario["max_model_len"]
    scheduler_config = SchedulerConfig(
        max_num_seqs=scenario["max_num_seqs"],
        max_num_batched_tokens=scenario["max_batched_tokens"],
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        long_prefill_token_threshold=options.get("long_prefill_token_threshold", 0),
        enable_chunked_prefill=options.get("chunked_prefill", True),
        watermark=options.get("watermark", 0.0),
        policy="priority" if scenario["preset"] == "vllm-v1-priority" else "fcfs",
        async_scheduling=False,
    )
    model_config = ModelConfig(
        model=MODEL, tokenizer=MODEL, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len, seed=0
    )
    cache_config = CacheConfig(
        block_size=block_size, gpu_memory_utilization=0.9, enable_prefix_caching=scenario.get("prefix_caching", True)
    )
    config = VllmConfig(
        scheduler_config=scheduler_config,
        model_config=model_config,
        cache_config=cache_config,
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )


class Run:
    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.scheduler = make_scheduler(scenario)
        self.prefix_caching = scenario.get("prefix_caching", True)
        hasher = get_request_block_hasher(scenario["block_size"], sha256) if self.prefix_caching else None
        self.arrivals: dict[int, list[Request]] = {}
        for number, (asked, prompt) in enumerate(zip(scenario["requests"], prompts(scenario), strict=True)):
            sampling = SamplingParams(max_tokens=asked["max_new_tokens"], ignore_eos=True)
            sampling.update_from_generation_config({}, 0)
            request = Request(
                request_id=asked["id"],
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=float(asked.get("arrive", 0)) + number * 1e-6,
                priority=-asked.get("priority", 0),
                block_hasher=hasher,
            )
            self.arrivals.setdefault(asked.get("arrive", 0), []).append(request)
        self.requests: dict[str, Request] = {}
        self.tokens = itertools.count(2**31 - 2, -1)
        self.preemptions: dict[str, int] = {}
        self.generated = {asked["id"]: 0 for asked in scenario["requests"]}
        self.watch = Watch(
            self.scheduler,
            scenario["block_size"],
            scenario["max_batched_tokens"],
            scenario.get("store_after_step", False),
        )

    def play(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = []
        idle, last_arrival = 0, max(self.arrivals)
        while True:
            number = len(steps)
            for request in self.arrivals.get(number, []):
                self.scheduler.add_request(request)
                self.requests[request.request_id] = request
            steps.append(self.step(number))
            if number >= last_arrival and not self.scheduler.has_unfinished_requests():
                break
            idle = 0 if steps[-1]["scheduled"] or number < last_arrival else idle + 1
            if idle == MAX_IDLE_STEPS:
                return self.outcome(steps[:-idle]) | {"stuck": True}
        return self.outcome(steps)

    def outcome(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        return {"steps": steps, "num_steps": len(steps), "generated_tokens": self.generated, **self.watch.firsts}

    def step(self, number: int) -> dict[str, Any]:
        scheduler = self.scheduler
        known = {name: request.num_tokens for name, request in self.requests.items()}
        self.watch.before_step(number)
        output = scheduler.schedule()
        cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        resumed = output.scheduled_cached_reqs
        computed_tokens = zip(resumed.req_ids, resumed.num_computed_tokens, strict=True)
        cached |= {name: computed for name, computed in computed_tokens if name in resumed.resumed_req_ids}
        scheduled, sampled = [], {}
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            computed = request.num_computed_tokens  # schedule() has moved it on already
            decodes = computed - tokens == known[name] - 1 and request.num_output_tokens > 0 and name not in cached
            phase = "decode" if decodes else "prefill"
            scheduled.append({"id": name, "tokens": tokens, "cached_tokens": cached.get(name, 0), "phase": phase})
            sampled[name] = [next(self.tokens)] if computed == known[name] else []
        self.watch.after_schedule(output.num_scheduled_tokens)
        free, with_hash = self.watch.free_blocks()
        step = {
            "step": number,
            "scheduled": scheduled,
            "preempted": self.preempted(),
            "rejected": [],
            "finished": [],
            "free_blocks": free - with_hash,
            "cached_blocks": with_hash,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
        }
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
        )
        scheduler.update_from_output(output, result)
        for name in names:
            self.generated[name] += len(sampled[name])
            if self.requests[name].is_finished():
                step["finished"].append(name)
                del self.requests[name]
        return step

    def preempted(self) -> list[dict[str, str]]:
        names = []
        for name, request in self.requests.items():
            if request.num_preemptions > self.preemptions.get(name, 0):
                self.preemptions[name] = request.num_preemptions
                names.append({"id": name, "mode": "recompute"})
        return names


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(Run(json.loads(line)).play()), flush=True)


if __name__ == "__main__":
    main()
