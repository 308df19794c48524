"""Preempted requests that keep their KV in host memory of their worker.

A swap crosses three parties in this order, which is what makes it safe:

    1. the request gives way: SwapOutOp gathers for the cache, behind the commit of its last tokens;
    2. the cache releases its device blocks and names the copies to make (`answered`). From now on it may grant these
       blocks, but what it grants reaches the worker with a later plan, or with the plan that makes the copies;
    3. the worker's next plan, whatever it is for, carries all copies that have gathered, and makes them first
       (`Worker.swap_outs`). While there is no plan, nobody writes to the blocks.

It comes back like an admission: SwapInOp in a draft, copies and a new sequence in the draft's plan.

What the cache evicts from the device and keeps in host memory goes the same ways: its copies gather from 2. on
(`Worker.demotions`), and an admission that finds some of its prefix there makes copies like one that comes back: they
are made before its first tokens are computed, so the commit of these tells the cache of both.

A request that is swapped out waits in the queue as any other and stands in its worker's `swapped`. When the cache has
no room, or its worker is lost or drains, it is told to forget its sequence and is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.v1.cache_pb2 import CacheServiceLinkResponse
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerCounters
from scheduler_svc.core.workers.state import WorkerState


@dataclass(frozen=True, slots=True)
class Swaps:
    cache: CacheLink
    workers: Mapping[int, WorkerState]
    counters: SchedulerCounters

    def suits(self, request: Request, mode: str) -> bool:
        """Whether a request that has to give way is swapped; `mode` as in PreemptionPolicy."""
        worker = self.workers[request.worker]
        wanted = mode == "swap" or (mode == "auto" and request.is_one_of_several)
        # Else not all its known tokens but the last are computed; and a beam forks more than it decodes.
        computed = request.prompt_is_computed and not request.is_member
        if not (wanted and computed) or worker.draining:
            return False
        # At the most: what is in flight for it is dropped, and sampled anew when it is back.
        return worker.blocks_for(worker.num_tokens(request.slot) - 1) <= worker.free_host_blocks

    def start(self, worker: WorkerState, request: Request) -> None:
        """It has left its slot, and the cache has been told of all its tokens."""
        worker.free_host_blocks -= worker.blocks_for(request.num_tokens - 1)
        request.swapped_on, request.matches = worker.id, None
        worker.swapped[request.sequence] = request
        self.cache.swap_outs[request.sequence] = request

    def answered(
        self, swap_outs: Iterable[tuple[int, int, Request]], response: CacheServiceLinkResponse
    ) -> list[Request]:
        """Note the copies that the cache has asked for; returns the requests that it had no host blocks for."""
        refused = []
        for index, sequence, request in swap_outs:
            worker = self.workers.get(request.swapped_on)
            if worker is None or request.sequence != sequence:
                continue  # it has ended, or lost its worker
            result = response.results[index]
            if result.HasField("swap_out"):
                self.counters.swapped_out += 1
                request.host_blocks = result.swap_out.host_blocks
                worker.add_swap_out(sequence, result.swap_out.device_blocks, result.swap_out.host_blocks)
            else:
                worker.knows_cache = False  # the blocks come back with the next exchange
                refused.append(request)
        return refused

    def bind(self, request: Request) -> None:
        """It is about to come back."""
        del self.workers[request.swapped_on].swapped[request.sequence]

    def refused(self, request: Request) -> None:
        """There was no room to come back."""
        if request.swapped_on:
            self.workers[request.swapped_on].swapped[request.sequence] = request

    def resumed(self, request: Request) -> None:
        """It is seated, and the plan that makes the copies is on its way: whatever reads its blocks comes later."""
        request.swapped_on, request.host_blocks = 0, b""
        request.prompt_is_computed = True
        self.counters.swapped_in += 1
        self.cache.add_commit(request.sequence, b"", request.num_tokens - 1)

    def forget(self, request: Request) -> None:
        """Its sequence is about to be forgotten. Host blocks that it leaves may be granted before a copy to them has
        been sent: that one is not made any more."""
        worker = self.workers.get(request.swapped_on)
        if worker is not None:
            worker.swapped.pop(request.sequence, None)
            worker.swap_outs.pop(request.sequence, None)
        request.swapped_on, request.host_blocks = 0, b""
