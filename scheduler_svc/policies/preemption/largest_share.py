"""The tenant and the request that hold most are preempted first, also to make room for waiting requests.

If running sequences need more blocks than there are, the policy takes the tenant with most blocks (divided by the
tenant's weight), then that tenant's request with the most running sequences. The victim is the sequence of this request
that was admitted last. With one tenant and one sequence for each request, that is `last-in`.

If a request without running sequences waits, and the worker has no slot or no blocks for it, the victims come from
requests that run several sequences. The request with the most running sequences gives first, and its last admitted
sequence first. A request always keeps one sequence. A sequence is not preempted if the order would admit it again
before the waiting request. So a request with n = 64 uses every slot that no other request wants, and the next request
waits for one step, not for the end of a sample.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from typing import Literal

from scheduler_svc.core.policy.interfaces import Mode
from scheduler_svc.policies.api import PreemptionPolicy, Running, Step
from scheduler_svc.policies.options import PositiveAmount

MAX_SLOTS = 16  # freed at once; the next step frees more


class LargestShare(PreemptionPolicy):
    """Preempts sequences of the tenant and the request that hold most, also for waiting requests."""

    def __init__(
        self,
        requeue: Literal["arrival", "front", "back"] = "arrival",
        mode: Mode = "recompute",
        tenant_weights: dict[str, PositiveAmount] | None = None,
    ) -> None:
        """`tenant_weights`: as in the order `fair`."""
        self.requeue = requeue
        self.mode = mode
        self._weights = tenant_weights or {}

    def victims(self, step: Step) -> Iterator[Running]:
        """The last sequence of the largest request of the tenant with most blocks, again and again."""
        tenants: dict[str, list[tuple[int, int, Running]]] = {}
        shares: Counter[str] = Counter()
        nth: Counter[int] = Counter()  # sequences of the client's request so far
        for position, sequence in enumerate(step.running):
            request = sequence.request
            tenants.setdefault(request.tenant, []).append((nth[request.client_request], position, sequence))
            shares[request.tenant] += sequence.num_blocks
            nth[request.client_request] += 1
        for held in tenants.values():
            held.sort(key=lambda one: one[:2])
        heap = [(-shares[name] / self._weights.get(name, 1.0), name) for name in tenants]
        heapq.heapify(heap)
        while heap:
            share, name = heapq.heappop(heap)
            *_, sequence = tenants[name].pop()
            yield sequence
            if tenants[name]:
                heapq.heappush(heap, (share + sequence.num_blocks / self._weights.get(name, 1.0), name))

    def for_waiting(self, step: Step) -> Iterable[Running]:
        """Spare sequences of requests that run several, for up to MAX_SLOTS waiting requests that run none."""
        requests = (request for request in step.waiting() if not step.has_admitted(request))
        # If a request already runs sequences or is swapped out, the freed slots would be offered to it first.
        newcomers = list(takewhile(lambda r: not (r.num_running_siblings or r.is_swapped), islice(requests, MAX_SLOTS)))
        if not newcomers:
            return
        spare = (one for one in self._spare(step) if step.goes_before(newcomers[0], one.request))
        if step.num_free_slots > 0:  # blocks are missing, not slots
            missing = step.need_blocks(newcomers[0], step.uncached_tokens(newcomers[0]))
            for sequence in spare:
                if missing <= 0:
                    break
                missing -= sequence.num_blocks
                yield sequence
            return
        yield from islice(spare, len(newcomers))

    @staticmethod
    def _spare(step: Step) -> Iterator[Running]:
        """Sequences of requests that run several, as long as each request keeps one; the largest request first."""
        running: dict[int, list[Running]] = {}
        for sequence in step.running:
            running.setdefault(sequence.request.client_request, []).append(sequence)
        # By sequences that run on any worker; of equal requests the one that came last.
        heap = [(-held[0].request.num_running_siblings, -name) for name, held in running.items()]
        heapq.heapify(heap)
        while heap and heap[0][0] < -1:
            count, name = heapq.heappop(heap)
            held = running[-name]
            yield held.pop()
            if held:
                heapq.heappush(heap, (count + 1, name))
