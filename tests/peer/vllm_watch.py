"""Detects the steps in which vLLM's Scheduler differs from Paceline because it decides request by request.

vLLM decides and allocates one request at a time, so earlier decisions of a step affect later ones. Paceline schedules a
step on the cache as it was before the step, and then allocates. `Watch.firsts` names the first step of each kind:

  evicts_match          a waiting request that the step looked up had a shorter hit than before the step
  shares_unwritten      the hit was longer: it includes a block that this step will write (Paceline shares it as well)
  stores_twice          a block was stored though the cache had an equal one. Paceline continues with the older block,
                        and holds both until the sequence ends
  evicts_then_preempts  running requests took cached blocks, but a request was still preempted afterwards
  keeps_chunk_short     (priority) the preempted request was already scheduled in this step. Its tokens return to the
                        budget. But another request's chunk, for which its blocks were taken, had been cut to the
                        smaller budget before, and vLLM does not lengthen that chunk
  stores_unwritten      (priority) the preempted request was already scheduled in this step, and a block that it was to
                        fill stays in the cache though no step writes it
  stops_at_itself       (priority) a running request preempted itself, so no request behind it runs
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class Watch:
    def __init__(self, scheduler: Scheduler, block_size: int, max_batched_tokens: int, store_after_step: bool) -> None:
        """`store_after_step` changes vLLM in one way: a block can be reused only after the step that writes it."""
        self.scheduler = scheduler
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.firsts: dict[str, int] = {}
        self._number = self._cached_before = 0
        self._hits_before: dict[str, int] = {}
        self._hits: dict[str, int] = {}  # cached tokens of the requests that the step looked at
        self._has_preempted = False  # in this step
        self._last_asked: tuple[Request, int]  # the last request that asked for blocks, with its tokens to compute
        self._served: set[str] = set()  # the requests that got blocks in this step
        self._deferred: dict[str, tuple[Request, int]] = {}
        manager = scheduler.kv_cache_manager
        self._look_up, manager.get_computed_blocks = manager.get_computed_blocks, self._noted_look_up
        self._allocate, manager.allocate_slots = manager.allocate_slots, self._noted_allocate
        self._preempt, scheduler._preempt_request = scheduler._preempt_request, self._noted_preempt
        self._store = manager.coordinator.cache_blocks
        if store_after_step:
            manager.coordinator.cache_blocks = self._defer_store

    def before_step(self, number: int) -> None:
        self._hits_before = {r.request_id: self._look_up(r)[1] for r in self.scheduler.waiting}
        self._hits.clear()
        self._served.clear()
        self._number, self._has_preempted, self._cached_before = number, False, self.free_blocks()[1]

    def after_schedule(self, scheduled: dict[str, int]) -> None:
        for name, found in self._hits.items():
            if found > self._hits_before[name]:
                self._happened("shares_unwritten")
            if found < self._hits_before[name]:
                self._happened("evicts_match")
        idle = any(request.request_id not in scheduled for request in self.scheduler.running)
        if self._has_preempted and idle and sum(scheduled.values()) < self.max_batched_tokens:
            self._happened("stops_at_itself")
        for name in scheduled:
            if name in self._deferred:
                self._store(*self._deferred[name])
        self._deferred.clear()  # a request that was scheduled and then preempted writes nothing
        stored = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        if any(isinstance(blocks, dict) and len(blocks) > 1 for blocks in stored._cache.values()):
            self._happened("stores_twice")

    def free_blocks(self) -> tuple[int, int]:
        """All blocks without a user, and those of them that can be reused for their content."""
        blocks = self.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        return len(blocks), sum(block.block_hash is not None for block in blocks)

    def _happened(self, what: str) -> None:
        self.firsts.setdefault(what, self._number)

    def _defer_store(self, request: Request, num_computed_tokens: int) -> None:
        self._deferred[request.request_id] = (request, num_computed_tokens)

    def _noted_look_up(self, request: Request) -> Any:
        found = self._look_up(request)
        self._hits[request.request_id] = found[1]
        return found

    def _noted_allocate(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        self._last_asked = (request, num_new_tokens)
        blocks = self._allocate(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            self._served.add(request.request_id)
        return blocks

    def _noted_preempt(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if not self._has_preempted and self.free_blocks()[1] < self._cached_before:
            self._happened("evicts_then_preempts")
        self._has_preempted = True
        if request.request_id in self._served:
            asking, num_new_tokens = self._last_asked
            if asking.num_computed_tokens + num_new_tokens < asking.num_tokens:
                self._happened("keeps_chunk_short")
            (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
            if manager.num_cached_block.get(request.request_id, 0) * self.block_size > request.num_computed_tokens:
                self._happened("stores_unwritten")
        self._preempt(request, *args, **kwargs)
