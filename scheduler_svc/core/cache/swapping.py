"""Preempted requests that keep their KV in their worker's host memory.

A swap crosses three services, in this order, which makes it safe:

    1. The request is preempted. SwapOutOp gathers for the cache, after the commit of the request's last tokens.
    2. The cache frees the request's device blocks and names the copies to make (`answered`). It may now grant these
       blocks to another sequence. The grant reaches the worker with a later plan, or with the plan of the copies.
    3. The worker's next plan carries all gathered copies, and the worker makes them first (`SwapSpace.swap_outs`).
       Without a plan, no step writes to the blocks.

A request resumes like an admission: SwapInOp in a pending step; copies and a new sequence in its plan.

Blocks that the cache evicts from the device and keeps in host memory follow the same steps from 2 on: the cache names
the copies, and they gather in `SwapSpace.demotions`. An admission that finds a part of its prefix in host memory makes
copies like a request that resumes. The worker makes these copies before it computes the request's first tokens. So the
commit of these tokens also tells the cache that the copies are made.

A swapped-out request waits in the queue like any other, and is in its worker's `host.swapped`. If the cache has no host
blocks for it, or its worker is lost or drains, its sequence is forgotten, and the request computes its tokens again. If
there is no room to resume, it stays swapped out.
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
    """Swaps preempted requests to host memory and back."""

    cache: CacheLink
    workers: Mapping[int, WorkerState]
    counters: SchedulerCounters

    def suits(self, request: Request, mode: str) -> bool:
        """Whether a request that is preempted is swapped. `mode` as in PreemptionPolicy."""
        worker = self.workers[request.held.worker]
        wanted = mode == "swap" or (mode == "auto" and request.is_one_of_several)
        # A swap keeps all known tokens but the last, so they must be computed. Beams are not swapped: a beam forks more
        # often than it decodes.
        computed = request.held.prompt_is_computed and not request.is_member
        if not (wanted and computed) or worker.draining:
            return False
        # An upper bound: tokens in flight are dropped, and sampled again when the request is back.
        return worker.blocks_for(worker.batch.num_tokens(request.held.slot) - 1) <= worker.host.free_blocks

    def start(self, worker: WorkerState, request: Request) -> None:
        """The request has left its slot, and the cache knows all its tokens."""
        worker.host.free_blocks -= worker.blocks_for(request.num_tokens - 1)
        request.held.swapped_on, request.matches = worker.id, None
        worker.host.swapped[request.held.sequence] = request
        self.cache.swap_outs[request.held.sequence] = request

    def answered(
        self, swap_outs: Iterable[tuple[int, int, Request]], response: CacheServiceLinkResponse
    ) -> list[Request]:
        """Note the copies that the cache has asked for. Returns the requests that the cache had no host blocks for."""
        refused = []
        for index, sequence, request in swap_outs:
            worker = self.workers.get(request.held.swapped_on)
            if worker is None or request.held.sequence != sequence:
                continue  # the request has ended, or lost its worker
            result = response.results[index]
            if result.HasField("swap_out"):
                self.counters.swapped_out += 1
                request.held.host_blocks = result.swap_out.host_blocks
                worker.host.add_swap_out(sequence, result.swap_out.device_blocks, result.swap_out.host_blocks)
            else:
                worker.knows_cache = False  # the next exchange frees the request's device blocks
                refused.append(request)
        return refused

    def bind(self, request: Request) -> None:
        """The request is about to resume."""
        del self.workers[request.held.swapped_on].host.swapped[request.held.sequence]

    def refused(self, request: Request) -> None:
        """There was no room to resume the request."""
        if request.held.swapped_on:
            self.workers[request.held.swapped_on].host.swapped[request.held.sequence] = request

    def resumed(self, request: Request) -> None:
        """The request is in a slot. The plan with its copies is sent, so later steps may read its blocks."""
        request.held.swapped_on, request.held.host_blocks = 0, b""
        request.held.prompt_is_computed = True
        self.counters.swapped_in += 1
        self.cache.add_commit(request.held.sequence, b"", request.num_tokens - 1)

    def forget(self, request: Request) -> None:
        """The request's sequence is about to be forgotten. The cache may then grant its host blocks again, so a copy to
        them that was not sent yet is dropped."""
        worker = self.workers.get(request.held.swapped_on)
        if worker is not None:
            worker.host.forget(request.held.sequence)
        request.held.swapped_on, request.held.host_blocks = 0, b""
