"""Places a request where it costs the least time: its own, and that of all requests beside it (docs/placement.md).

The cost of a worker, in seconds summed over requests:

    first token        steps in flight, prefill queued ahead, own uncached prefill, at the worker's own fitted rates
  + own decoding       expected output tokens x the time of one step with the requests there and this request
  + others' slowdown   each row there waits for this request's prefill once, and in every step for its row and context

A cached prefix is worth the prefill time that it saves, once. So one request alone hardly ever pays for a second copy
of a prefix; many do. For each prefix the policy sums up the time that requests have lost by following it to a worker
that would not be the best one otherwise. When the loss of the next request would bring this sum to the cost of a second
copy, that request makes the copy instead. So the cost is at most twice that of a rule that knows the future (ski
rental: Karlin et al., Algorithmica 1988). If the copy goes to a worker without rows, half of the copy's cost is enough,
and the total cost is at most three times that of such a rule. Each request adds at least 1/20 of a copy's cost to the
sum, so that no worker stays without a prefix that all requests share.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.policies.api import FleetView, PlacementPolicy, RequestView, WorkerView

# Costs that differ by less than this part count as equal: the fits of equal workers differ by about as much (5 % jitter
# over MEMORY_STEPS steps).
SAME = 0.02
# If a request waits n times this many steps for its first token, that wait is weighted by n + 1. With a plain sum of
# seconds, a few requests would wait long only to save many others a little. Steps are those of the fastest worker with
# one row, so the rule holds for slow and fast models. Of the values from 2 to 100, this one had the lowest 99th
# percentiles, and cost no throughput (in the simulated cases of docs/placement-comparison.md).
PATIENCE_STEPS = 4.0
# With 1/50, workers stayed without the prefix for too long: 99th percentiles of TTFT were up to twice as long.
LEAST_LOST = 1 / 20
# Part of a copy's cost that the sum must reach if the copying worker has no rows: there the copy delays no other
# request. With 1, such workers were idle longer: the average imbalance was 2.1 % above the best rule's. With 1/2 it is
# 1.7 % above (in the simulated cases of docs/placement-comparison.md).
IDLE_COPY = 1 / 2
LEAST_STEP_S = 1e-6
GUESSED_OUTPUT_TOKENS = 256.0  # expected of a request before the first one has ended
MAX_PREFIXES = 4096  # with a sum of lost time; the prefix that no request has followed for longest is forgotten first
MAX_NAMED = 4  # workers that `explain` names

# Namespace, tokens in whole blocks, the last of these blocks. Two prefixes that agree in these may differ in earlier
# blocks: then a copy is made a little early.
PrefixKey = tuple[tuple[str, str], int, bytes]


class Cost(NamedTuple):
    """The cost of a request on a worker, in seconds."""

    total_s: float  # with the wait for the first token weighted; see PATIENCE_STEPS
    first_s: float  # to the first token


class PlacementChoice(NamedTuple):
    """Where a round has placed a request, and the reason."""

    worker_id: int
    costs: list[tuple[Cost, WorkerView]]  # by ascending id
    prefix: PrefixKey | None  # that it follows, or copies
    lost_s: float  # by following it
    copies: bool


class PredictedTime(PlacementPolicy):
    """Chooses the worker with the lowest predicted cost, and copies prefixes that have cost more than a copy."""

    # The best of a few random ones is nearly as good as the best of all (Mitzenmacher, TPDS 2001).
    max_compared = 16

    def __init__(self) -> None:
        self._mean_tokens: float | None = None
        self._choices: dict[int, PlacementChoice] = {}  # of the round, by arrival index
        self._lost_s: OrderedDict[PrefixKey, float] = OrderedDict()  # the sums; bound requests only
        self._round_lost_s: dict[PrefixKey, float] = {}  # the sums with the requests that the round has placed
        self._bindings = itertools.count(1)
        self._last_binding: dict[int, int] = {}  # by worker
        self._patience_s = 1.0  # of the round

    def begin(self, fleet: FleetView) -> None:
        """Forget the last round's choices, and read the expected output length and the shortest step."""
        self._mean_tokens = fleet.mean_output_tokens
        shortest_s = min((worker.step_time.of(0, 0, 1) for worker in fleet.workers), default=1.0)
        self._patience_s = PATIENCE_STEPS * max(shortest_s, LEAST_STEP_S)
        self._choices.clear()
        self._round_lost_s.clear()

    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        """The worker with the lowest cost. If a copy pays: the worker that would be the best if all had the prefix."""
        if len(workers) == 1:
            return workers[0]
        expected = self._expected_tokens(request)
        cached = [worker.cached_tokens(request) for worker in workers]
        costs = [self._cost(request, worker, tokens, expected) for worker, tokens in zip(workers, cached, strict=True)]
        best = self._least(costs, workers)
        prefix, lost_s, copies = None, 0.0, False
        most = cached[best]
        if min(cached) + workers[best].block_size <= most:
            # If every worker had as much of the request in its cache, would another worker be better?
            ideal = [
                costs[i] if cached[i] >= most else self._cost(request, worker, most, expected)
                for i, worker in enumerate(workers)
            ]
            other = self._least(ideal, workers)
            lost_s = costs[best].total_s - ideal[other].total_s
            if other != best and cached[other] < most:
                size = workers[best].block_size
                num_tokens = most // size * size
                prefix = request.namespace, num_tokens, request.token_ids[4 * (num_tokens - size) : 4 * num_tokens]
                copy_s = costs[other].total_s - ideal[other].total_s
                lost_s = max(lost_s, LEAST_LOST * copy_s)
                lost_before_s = self._round_lost_s.get(prefix, self._lost_s.get(prefix, 0.0))
                enough_s = copy_s if workers[other].num_rows else IDLE_COPY * copy_s
                copies = lost_before_s + lost_s >= enough_s
                self._round_lost_s[prefix] = 0.0 if copies else lost_before_s + lost_s
                best = other if copies else best
        chosen = workers[best]
        self._choices[request.arrival_index] = PlacementChoice(
            chosen.id, list(zip(costs, workers, strict=True)), prefix, lost_s, copies
        )
        return chosen

    def bound(self, request: RequestView, worker_id: int) -> str:
        """Add the lost time to the prefix's sum; a copy sets the sum to 0. Returns the predictions."""
        self._last_binding[worker_id] = next(self._bindings)
        if len(self._last_binding) > 4 * MAX_PREFIXES:  # of workers that have left
            del self._last_binding[min(self._last_binding, key=self._last_binding.__getitem__)]
        choice = self._choices.pop(request.arrival_index, None)
        if choice is None or choice.worker_id != worker_id:
            return ""
        if choice.prefix is not None:
            lost_s = 0.0 if choice.copies else self._lost_s.get(choice.prefix, 0.0) + choice.lost_s
            self._lost_s[choice.prefix] = lost_s
            self._lost_s.move_to_end(choice.prefix)
            if len(self._lost_s) > MAX_PREFIXES:
                self._lost_s.popitem(last=False)
        return _explained(choice)

    def _expected_tokens(self, request: RequestView) -> float:
        """Output tokens that it will still generate."""
        left = float(request.max_new_tokens - request.num_output_tokens)
        if request.ignores_eos:
            return left
        return min(left, GUESSED_OUTPUT_TOKENS if self._mean_tokens is None else self._mean_tokens)

    def _cost(self, request: RequestView, worker: WorkerView, cached_tokens: int, expected_tokens: float) -> Cost:
        base_s, token_s, context_s, row_s = worker.step_time
        rows, queued_tokens = worker.num_rows, worker.queued_prefill_tokens
        uncached = request.num_tokens - cached_tokens
        step_s = base_s + row_s * rows + context_s * worker.context_tokens
        steps = 1 + (queued_tokens + uncached - 1) // max(worker.max_batched_tokens - rows, 1)
        own_s = token_s * uncached
        first_s = worker.in_flight_s + steps * step_s + token_s * queued_tokens + own_s + row_s
        slower_s = row_s + context_s * (request.num_tokens + expected_tokens / 2)  # each step, because of this row
        others_tokens = expected_tokens if self._mean_tokens is None else min(expected_tokens, self._mean_tokens)
        total_s = first_s + first_s * first_s / self._patience_s
        total_s += expected_tokens * (step_s + slower_s) + rows * (own_s + slower_s * others_tokens)
        return Cost(total_s, first_s)

    def _least(self, costs: Sequence[Cost], workers: Sequence[WorkerView]) -> int:
        """The index of the lowest cost. Of equal costs, that of the worker that has waited longest for a request."""
        least = min(costs)
        most_s, latest_s = least.total_s * (1 + SAME), least.first_s * (1 + SAME)
        same = [i for i, cost in enumerate(costs) if cost.total_s <= most_s and cost.first_s <= latest_s]
        return min(same, key=lambda i: self._last_binding.get(workers[i].id, 0))


def _explained(choice: PlacementChoice) -> str:
    """Predicted times of the chosen worker, and of the next best ones."""
    own = next(cost for cost, worker in choice.costs if worker.id == choice.worker_id)
    others = sorted((cost, worker.id) for cost, worker in choice.costs if worker.id != choice.worker_id)
    text = f"predicted: first token after {own.first_s:.3f} s, cost {own.total_s:.3f} s"
    for cost, worker_id in others[: MAX_NAMED - 1]:
        text += f"; worker {worker_id}: {cost.first_s:.3f} s, cost {cost.total_s:.3f} s"
    if choice.copies:
        assert choice.prefix is not None
        text += f"; makes a copy of a prefix of {choice.prefix[1]} tokens"
    return text
