"""Plays scenarios (docs/scenarios.md) on SGLang's own Scheduler: reads and writes one JSON object per line.

Runs in the environment that tests/peer/env.sh makes, and imports nothing of Paceline. Every decision is SGLang's:
Scheduler.get_next_batch_to_run with its SchedulePolicy, PrefillAdder, RadixCache (a page is the scenario's block),
allocator and retraction. Our code (sglang_loop.py) makes the rest: a Scheduler without processes, sockets and a model,
and the results that a model would return. Overlapped scheduling is off: each step is decided on the finished results of
the previous step.

How a scenario becomes SGLang's settings:
  max_batched_tokens   chunked_prefill_size; with `chunked_prefill: false` chunking is off
  max_prefill_tokens   max_prefill_tokens
  max_num_seqs         the rows of the request table (max_running_requests)
`ignore_eos` is not set, so SGLang assumes that requests may stop early. Otherwise it would reserve all that they may
generate and not use `new_token_ratio`. No request samples a token that ends it. Three settings remove differences
(docs/preset-checks.md). Before each step the queue is sorted by the order in which requests entered it: SGLang sorts it
in place, and ties would otherwise keep the order of the last sort. The lpm order ranks a request by what it can reuse.
prefill_decode_interval_min_bs is 1.

How the output is read off:
  tokens, cached_tokens   extend_end - prefix_len and prefix_len of a request in a prefill batch; cached_tokens only for
                          its first chunk, when it comes from the queue
  free_blocks             pages of the allocator's free list; cached_blocks: evictable pages of the tree
The comparison needs more fields than docs/scenarios.md has:
  state         before the step: blocks that are free or evictable, and for each waiting request, its
                cached tokens and how many of these are held by running requests
  ratio         new_token_ratio after the step
  deduplicated  tokens that two requests computed at the same time: SGLang frees the pages of the
                later request, which continues with the tree's pages
  evicted       tokens taken out of the tree in the step
"""

# ruff: noqa: E402 - SGLang can be imported only after the stand-ins for packages that are not installed

from __future__ import annotations

import itertools
import json
import logging
import sys
import warnings
from array import array
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import sglang_stubs

sglang_stubs.install()

from prompts import prompts
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang_loop import VOCAB, Loop, Req, ScheduleBatch

MODEL = str(Path(__file__).resolve().parents[2] / "demo" / "checkpoint")  # any model: only its config is read
MAX_IDLE_STEPS = 20


class Run:
    def __init__(self, scenario: dict[str, Any]) -> None:
        self.loop = Loop(scenario)
        self.arrivals: dict[int, list[Req]] = {}
        for asked, prompt in zip(scenario["requests"], prompts(scenario), strict=True):
            sampling = SamplingParams(max_new_tokens=asked["max_new_tokens"], temperature=0.0)
            sampling.normalize(None)
            request = Req(asked["id"], "", array("q", prompt), sampling, vocab_size=VOCAB)
            self.loop.init_req_max_new_tokens(request)
            self.arrivals.setdefault(asked.get("arrive", 0), []).append(request)
        self.tokens = itertools.count(VOCAB - 2, -1)
        self.generated = {asked["id"]: 0 for asked in scenario["requests"]}

    def play(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = []
        idle, last_arrival, loop = 0, max(self.arrivals), self.loop
        while True:
            number = len(steps)
            for request in self.arrivals.get(number, []):
                loop._add_request_to_queue(request)
            steps.append(self.step(number))
            pending = number < last_arrival
            if not (pending or loop.waiting_queue or loop.chunked_req or self.running()):
                break
            idle = 0 if steps[-1]["scheduled"] or pending else idle + 1
            if idle == MAX_IDLE_STEPS:
                del steps[-idle:]
                break
        outcome = {"steps": steps, "num_steps": len(steps), "generated_tokens": self.generated}
        return outcome | {"stuck": True} if idle else outcome

    def running(self) -> list[Req]:
        last = self.loop.last_batch.reqs if self.loop.last_batch else []
        requests = {id(req): req for req in (*self.loop.running_batch.reqs, *last)}
        return [req for req in requests.values() if not req.finished() and req.kv.holds_kv]

    def step(self, number: int) -> dict[str, Any]:
        loop, cache = self.loop, self.loop.tree_cache
        queued = set(map(id, loop.waiting_queue))
        evicted, deduplicated = cache.evicted_tokens, cache.deduplicated_tokens
        loop.waiting_queue.sort(key=lambda req: req.entered)
        loop.note_state()
        plan = loop.get_next_batch_to_run(loop.running_batch, loop.last_batch)
        loop.running_batch = plan.running_batch
        batch = loop.last_batch = plan.batch_to_run
        retracted = [req.rid for req in loop.waiting_queue if id(req) not in queued]
        scheduled = self.scheduled(batch, queued) if batch else []
        free, evictable = loop.token_to_kv_pool_allocator.available_size(), cache.evictable_size()
        running = len(self.running())
        finished = self.run(batch) if batch else []
        if not batch and not loop.waiting_queue:
            loop.new_token_ratio_tracker.reset()  # as Scheduler.on_idle does
        return {
            "step": number,
            "scheduled": scheduled,
            "preempted": [{"id": name, "mode": "recompute"} for name in retracted],
            "rejected": [],
            "finished": finished,
            "free_blocks": free // loop.page_size,
            "cached_blocks": evictable // loop.page_size,
            "waiting": len(loop.waiting_queue),
            "running": running,
            "state": loop.state,
            "ratio": loop.new_token_ratio_tracker.current,
            "deduplicated": cache.deduplicated_tokens - deduplicated,
            "evicted": cache.evicted_tokens - evicted,
        }

    def scheduled(self, batch: ScheduleBatch, queued: set[int]) -> list[dict[str, Any]]:
        if batch.forward_mode.is_decode():
            return [{"id": req.rid, "tokens": 1, "cached_tokens": 0, "phase": "decode"} for req in batch.reqs]
        return [
            {
                "id": req.rid,
                "tokens": req.extend_end - req.prefix_len,
                "cached_tokens": req.prefix_len if id(req) in queued else 0,
                "phase": "prefill",
            }
            for req in batch.reqs
        ]

    def run(self, batch: ScheduleBatch) -> list[str]:
        """Does the work of a model and of SGLang's result processing. Returns the ids of the requests that finished."""
        finished = []
        for req in batch.reqs:
            if req.inflight_middle_chunks > 0:  # its prompt is not done
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(next(self.tokens))
            self.generated[req.rid] += 1
            req.update_finish_state()
            if req.finished():
                release_kv_cache(req, self.loop.tree_cache, checkpoint=True)
                finished.append(req.rid)
            elif batch.forward_mode.is_extend():
                checkpoint_kv_cache(req, self.loop.tree_cache)
        return finished


def main() -> None:
    logging.disable(logging.WARNING)
    arguments = ServerArgs(
        model_path=MODEL,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
    )
    publish(arguments, role="scheduler")
    for line in sys.stdin:
        print(json.dumps(Run(json.loads(line)).play()), flush=True)


if __name__ == "__main__":
    main()
