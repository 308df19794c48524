"""Sees in vLLM's Scheduler, from outside, the steps in which its way of deciding one by one matters.

vLLM decides and allocates request by request, so what a step has done so far counts for those that come after. Paceline
composes a step on the cache as it was before, and then allocates. `Watch.firsts` names the first step of each kind:

  evicts_match          a waiting request that was looked at had a shorter hit than before the step
  shares_unwritten      it had a longer one: of a block that this step is to write
  stores_twice          a block was stored that was there already: Paceline goes on with the older one, and holds
                        both for the time being
  evicts_then_preempts  cached blocks went to running requests, and then one had to give way after all
  keeps_chunk_short     (priority) what gave way had its place in the step already; the chunk that it gave way for had
                        been cut to the budget, and does not get the tokens that came back
  stores_unwritten      (priority) the same, and by that place it had filled a block, which stays in the cache though
                        nothing will have written it
  stops_at_itself       (priority) a running request gave way to itself, and so no request behind it runs either
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class Watch:
    def __init__(self, scheduler: Scheduler, block_size: int, max_batched_tokens: int, store_after_step: bool) -> None:
        """`store_after_step` changes one thing in what vLLM does: a block can be reused once the step that writes it
        has run, not as soon as it is allocated."""
        self.scheduler = scheduler
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.firsts: dict[str, int] = {}
        self._number = self._cached_before = 0
        self._hits_before: dict[str, int] = {}
        self._hits: dict[str, int] = {}  # cached tokens of the requests that the step looked at
        self._gave_way = False  # a request, in this step
        self._asking: tuple[Request, int]  # for blocks, last, with so many tokens to compute
        self._served: set[str] = set()  # the requests that got blocks in this step
        self._kept_back: dict[str, tuple[Request, int]] = {}
        manager = scheduler.kv_cache_manager
        self._look_up, manager.get_computed_blocks = manager.get_computed_blocks, self._noted_look_up
        self._allocate, manager.allocate_slots = manager.allocate_slots, self._noted_allocate
        self._preempt, scheduler._preempt_request = scheduler._preempt_request, self._noted_preempt
        self._store = manager.coordinator.cache_blocks
        if store_after_step:
            manager.coordinator.cache_blocks = self._keep_back

    def before_step(self, number: int) -> None:
        self._hits_before = {r.request_id: self._look_up(r)[1] for r in self.scheduler.waiting}
        self._hits.clear()
        self._served.clear()
        self._number, self._gave_way, self._cached_before = number, False, self.free_blocks()[1]

    def after_schedule(self, scheduled: dict[str, int]) -> None:
        for name, found in self._hits.items():
            if found > self._hits_before[name]:
                self._happened("shares_unwritten")
            if found < self._hits_before[name]:
                self._happened("evicts_match")
        idle = any(request.request_id not in scheduled for request in self.scheduler.running)
        if self._gave_way and idle and sum(scheduled.values()) < self.max_batched_tokens:
            self._happened("stops_at_itself")
        for name in scheduled:
            if name in self._kept_back:
                self._store(*self._kept_back[name])
        self._kept_back.clear()  # what was scheduled and then preempted never writes
        stored = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        if any(isinstance(blocks, dict) and len(blocks) > 1 for blocks in stored._cache.values()):
            self._happened("stores_twice")

    def free_blocks(self) -> tuple[int, int]:
        """All blocks without a user, and those of them that can be reused for their content."""
        blocks = self.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        return len(blocks), sum(block.block_hash is not None for block in blocks)

    def _happened(self, what: str) -> None:
        self.firsts.setdefault(what, self._number)

    def _keep_back(self, request: Request, num_computed_tokens: int) -> None:
        self._kept_back[request.request_id] = (request, num_computed_tokens)

    def _noted_look_up(self, request: Request) -> Any:
        found = self._look_up(request)
        self._hits[request.request_id] = found[1]
        return found

    def _noted_allocate(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        self._asking = (request, num_new_tokens)
        blocks = self._allocate(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            self._served.add(request.request_id)
        return blocks

    def _noted_preempt(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if not self._gave_way and self.free_blocks()[1] < self._cached_before:
            self._happened("evicts_then_preempts")
        self._gave_way = True
        if request.request_id in self._served:
            asking, num_new_tokens = self._asking
            if asking.num_computed_tokens + num_new_tokens < asking.num_tokens:
                self._happened("keeps_chunk_short")
            (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
            if manager.num_cached_block.get(request.request_id, 0) * self.block_size > request.num_computed_tokens:
                self._happened("stores_unwritten")
        self._preempt(request, *args, **kwargs)
