"""The cost of choosing the next request: each order policy at 128 to 5,000 waiting, beside SGLang's of the same name.

The requests come in 16 families. A family shares 512 tokens, and 0 to 480 of these are cached, different for each
family. Between two passes 1 % of the requests leave, as many new ones arrive, and 1 % get another match. In a pass of
ours, the policy learns of these changes (O(changes)) and names the first 16 requests ("next"). In a pass of SGLang's,
the list loses the requests that left and gets the new ones, and calc_priority matches and sorts all waiting requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

from bench.control_plane import REPEATS, in_turns, ratio, spread
from bench.cores import BLOCK_SIZE
from bench.peers.peer import Peer
from bench.peers.quiet import no_collections
from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.requests.request import PrefixMatch, Request, RequestView, SubmissionMetadata
from scheduler_svc.policies.registry import find, names

WAITING = (128, 1_000, 5_000)
PASSES = 10  # in each repeat
FIRST = 16
FAMILIES, SHARED, OWN = 16, 512, 128
# The orders that SGLang also has. With more than 128 waiting requests, SGLang uses fcfs instead of lpm and hrrn.
SGLANG = ("fcfs", "lof", "random", "lpm", "dfs-weight", "hrrn")
SGLANG_FCFS_ABOVE = {"lpm": 128, "hrrn": 128}


def requests(rng: np.random.Generator) -> Iterator[Request]:
    for i in count(1):
        family = int(rng.integers(FAMILIES))
        shared = np.arange(SHARED) + 1000 * family
        prompt = np.concatenate((shared, rng.integers(1 << 20, 1 << 29, OWN))).astype(np.int32)
        request = Request(
            arrival_index=i,
            session_id="",
            handle=i,
            request_id=str(i),
            prompt=prompt.tobytes(),
            output=bytearray(),
            sampling=SamplingParams(max_tokens=int(rng.integers(1, 512))),
            arrival_s=float(i),
            metadata=SubmissionMetadata(
                deadline_s=1e9 + float(rng.integers(1000)), priority=float(rng.integers(5)), tenant=f"tenant-{i % 10}"
            ),
            queue_position=i,
        )
        request.matches = {1: PrefixMatch(2 * BLOCK_SIZE * family)}
        yield request


def passes(order: str, waiting: int, seed: int) -> list[tuple[float, float]]:
    """For each pass, the seconds to apply the changes and the seconds to name the next requests."""
    rng = np.random.default_rng(seed)
    policy = find("order", order)()
    source = requests(rng)
    queue = list(islice(source, waiting))
    for request in queue:
        policy.add(RequestView(request))
    changes = max(1, waiting // 100)
    seconds = []
    with no_collections():
        for number in range(PASSES + 1):
            changed = rng.choice(waiting, 2 * changes, replace=False).tolist()
            fresh = list(islice(source, changes))
            for i in changed[changes:]:
                match = 2 * BLOCK_SIZE * int(rng.integers(FAMILIES))
                queue[i].matches = {1: PrefixMatch(match)}
            began = time.perf_counter()
            for i, request in zip(changed, fresh, strict=False):
                policy.remove(RequestView(queue[i]))
                policy.add(RequestView(request))
            for i in changed[changes:]:
                policy.rematched(RequestView(queue[i]))
            applied = time.perf_counter()
            assert len(list(islice(policy.ordered(1e6), FIRST))) == FIRST
            if number:  # the first one is the warm-up
                seconds.append((applied - began, time.perf_counter() - applied))
            for i, request in zip(changed, fresh, strict=False):
                queue[i] = request
    return seconds


def measure_orders(peer: Peer) -> Iterator[dict[str, Any]]:
    for order in sorted(names("order")):
        for waiting in WAITING:
            row: dict[str, Any] = {"order": order, "waiting": waiting}
            if order in SGLANG:
                job = {"what": "order", "order": order, "waiting": waiting, "passes": PASSES}
                own, other = in_turns(partial(passes, order, waiting), peer, job)
            else:
                own, other = [s for seed in range(REPEATS) for s in passes(order, waiting, seed)], []
            row |= {**spread("us", [changes + first for changes, first in own]), **spread("peer_us", other)}
            row |= spread("next_us", [first for _, first in own])
            falls_back = bool(other) and waiting > SGLANG_FCFS_ABOVE.get(order, waiting)
            yield {**row, "ratio": ratio(row["us_median"], row["peer_us_median"]), "peer_falls_back": falls_back}
