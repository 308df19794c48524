"""Fill the pool, pause from the tail (TensorRT-LLM MAX_UTILIZATION).

One pass over everything active, running and waiting together, as the order ranks it. Each needs what its next step
takes: a running sequence the block that its next token may open, a waiting one its whole prompt. Who does not fit, for
blocks or for seats, pauses the last running one behind it and tries again; nothing from that one on is looked at in
this iteration. So a newcomer of higher priority pushes out running ones of lower priority, and the head always runs.

Under an order that ranks only what waits (fair, lpm) what runs comes first, by place: nobody is pushed out by one who
waits.
"""

from __future__ import annotations

from operator import itemgetter
from typing import ClassVar

from scheduler_svc.core.policy import CapacityPolicy, Verdict
from scheduler_svc.core.step import Step
from scheduler_svc.core.view import RequestView, Running


class MaxUtilization(CapacityPolicy):
    reserves_prompt: ClassVar[bool] = True
    preempts_for_waiting: ClassVar[bool] = True

    def __init__(self, prefix_aware: bool = True) -> None:
        self.prefix_aware = prefix_aware
        self._fitting: dict[int, RequestView] = {}  # waiting ones, by seniority

    def begin(self, step: Step) -> None:
        self._fitting.clear()
        waiting = step.waiting()
        first = next(waiting, None)
        if first is None and step.growth_blocks() <= step.available_blocks:
            return  # everything that runs fits, and nobody waits
        step.pause(self._pass(step, [] if first is None else [first, *waiting]))

    def _pass(self, step: Step, waiting: list[RequestView]) -> list[Running]:
        """The sequences that have to pause; notes who of the waiting may start."""
        running = sorted(step.running, key=lambda sequence: sequence.request.place)
        active: list[Running | RequestView] = [*running, *waiting]
        if active and step.rank(_request(active[0])) is not None:
            end = min(map(step.rank, step.preempted), default=None)
            ranked = [(step.rank(_request(item)), item) for item in active]
            active = [item for at, item in sorted(ranked, key=itemgetter(0)) if end is None or at < end]
        elif step.preempted:  # who has made room is not to take it
            active = list(running)
        seats = step.max_num_seqs - (step.num_running - len(step.running))  # what is finishing keeps its seat
        free_blocks, paused = step.available_blocks, list[Running]()
        i = 0
        while i < len(active):
            item = active[i]
            if isinstance(item, RequestView) and self._waits_for_prefix(step, item):
                i += 1
                continue
            need = _need(step, item)
            if seats > 0 and need <= free_blocks:
                seats, free_blocks, i = seats - 1, free_blocks - need, i + 1
                if isinstance(item, RequestView):
                    self._fitting[item.seniority] = item
                continue
            victim = next((j for j in range(len(active) - 1, i - 1, -1) if isinstance(active[j], Running)), None)
            if victim is None:
                break
            sequence = active[victim]
            assert isinstance(sequence, Running)
            paused.append(sequence)
            free_blocks += sequence.num_blocks
            del active[victim:]
        return paused

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        if self._fitting.pop(request.seniority, None) is not None:
            return Verdict.ADMIT
        return Verdict.SKIP if self._fitting else Verdict.STOP  # the queue's order may be another than the pass's

    def _waits_for_prefix(self, step: Step, request: RequestView) -> bool:
        return self.prefix_aware and step.another_computes_prefix_of(request, self._fitting.values())


def _request(item: Running | RequestView) -> RequestView:
    return item.request if isinstance(item, Running) else item


def _need(step: Step, item: Running | RequestView) -> int:
    if isinstance(item, Running):
        return max(0, step.blocks_for(item.num_computed_tokens + 1) - item.num_blocks)
    return step.need_blocks(item, step.uncached_tokens(item))
