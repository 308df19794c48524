"""Fill the pool, pause from the end (TensorRT-LLM MAX_UTILIZATION).

One pass over all requests, running and waiting together, in order of rank. Each needs what its next step takes: a
running sequence the block that its next token may open, a waiting request its whole prompt. If a request does not fit
(blocks, slots), the pass pauses the least urgent running sequence behind it and tries again. The paused sequence, and
every request behind it in rank, is not considered any more in this pass. If no running sequence is behind a waiting
request that does not fit, the pass ends. So a new request of higher priority preempts running ones of lower priority,
and the first request always runs.

Under an order that ranks only waiting requests (fair, lpm, dfs-weight, hrrn), running sequences come first, by queue
position: no waiting request preempts them.

If all running sequences fit and no waiting request is more urgent (the usual case), the pass skips the running ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice, takewhile
from operator import itemgetter
from typing import Any
from weakref import ref

from scheduler_svc.core.requests.prefixes import PrefixIndex
from scheduler_svc.policies.api import CapacityPolicy, RequestView, Running, Step, Verdict

Ranked = tuple[Any, RequestView]


class MaxUtilization(CapacityPolicy):
    """Admits all that fits now, and pauses the least urgent running sequences when they do not fit any more."""

    reserves_prompt = True
    preempts_for_waiting = True

    def __init__(self, prefix_aware: bool = True) -> None:
        self.prefix_aware = prefix_aware
        self._fitting: dict[int, RequestView] = {}  # waiting requests that fit, by arrival index
        # By worker: the ranking, num_departed and num_running; and the least urgent running request in that state.
        self._last: dict[int, tuple[tuple[object, int, int], ref[RequestView] | None]] = {}

    def begin(self, step: Step) -> None:
        """Make the pass over running and waiting requests. Raises Paused if a sequence has to be preempted."""
        self._fitting.clear()
        waiting = _newcomers(step)
        first = next(waiting, None)
        free_blocks, slots = step.available_blocks, step.max_num_seqs - step.num_running
        growth = step.growth_blocks() + sum(_growth(step, prefill) for prefill in step.prefills)
        if growth <= free_blocks and (first is None or not self._has_behind(step, first)):
            paused = self._pass(step, slots, free_blocks - growth, [], first, waiting)
        else:
            slots += len(step.running)  # finishing sequences keep their slots
            running = sorted(((_rank(step, item.request), item) for item in step.running), key=itemgetter(0))
            paused = self._pass(step, slots, free_blocks, running, first, waiting)
        step.pause(paused)

    def _has_behind(self, step: Step, first: Ranked) -> bool:
        """Whether a running sequence is less urgent than the most urgent waiting request."""
        state = step.ranking, step.num_departed, step.num_running
        known, last_known = self._last.get(step.worker_id, (None, None))
        last = last_known() if last_known and known == state else None
        if last is None:
            last = max((sequence.request for sequence in step.running), key=lambda r: _rank(step, r), default=None)
            self._last[step.worker_id] = state, ref(last) if last else None
        return last is not None and _rank(step, last) > first[0]

    def _pass(
        self,
        step: Step,
        slots: int,
        free_blocks: int,
        running: list[tuple[Any, Running]],
        new: Ranked | None,
        waiting: Iterator[Ranked],
    ) -> list[Running]:
        """The sequences to pause. Notes which waiting requests may start. `running` and the waiting requests (`new`,
        then `waiting`) are in order of rank."""
        paused = list[Running]()
        starting = PrefixIndex[RequestView](step.block_size)
        i = 0
        while i < len(running) or (new and not paused):  # after a pause, scheduling starts again
            at, sequence = running[i] if i < len(running) else (None, None)
            if new and (sequence is None or new[0] < at):
                request = new[1]
                waits = self.prefix_aware and step.another_computes_prefix_of(request, starting)
                if waits or step.exceeds_budget(request):
                    new = next(waiting, None)
                    continue
                need = step.need_blocks(request, step.uncached_tokens(request))
                if slots > 0 and need <= free_blocks:
                    self._fitting[request.arrival_index] = request
                    starting.add(request, request.num_tokens)
                    slots, free_blocks, new = slots - 1, free_blocks - need, next(waiting, None)
                    continue
            elif sequence is not None:
                need = _growth(step, sequence)
                if slots > 0 and need <= free_blocks:
                    slots, free_blocks, i = slots - 1, free_blocks - need, i + 1
                    continue
            if i == len(running):
                break
            _, victim = running.pop()
            paused.append(victim)
            free_blocks += victim.num_blocks
        return paused

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """Admit the requests that fit in the pass of `begin`."""
        if self._fitting.pop(request.arrival_index, None) is not None:
            return Verdict.ADMIT
        return Verdict.SKIP if self._fitting else Verdict.STOP  # the queue's order may differ from the pass


def _rank(step: Step, request: RequestView, waits: bool = False) -> Any:
    rank = step.rank(request)
    return (waits, 0 if waits else request.queue_position) if rank is None else rank


def _growth(step: Step, sequence: Running) -> int:
    """Blocks that its next token needs. A sequence in prefill may need some too, if less was cached than expected."""
    return max(0, step.blocks_for(sequence.num_computed_tokens + 1) - sequence.num_blocks)


def _newcomers(step: Step) -> Iterator[Ranked]:
    """Waiting requests, in order of rank. A request that was preempted in this step does not take the room back, nor
    does a request behind it."""
    waiting = ((_rank(step, request, waits=True), request) for request in step.waiting())
    swapped = sorted(islice(waiting, step.num_swapped), key=itemgetter(0))
    ranked = merge(swapped, waiting, key=itemgetter(0))
    if not step.preempted:
        return ranked
    end = min(_rank(step, request) for request in step.preempted)
    return takewhile(lambda item: item[0] < end, ranked)
