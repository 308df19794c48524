"""Measures the cost of the control plane: a decode step, an admission, an abort. vLLM's Scheduler runs the same
workloads in its own environment, in turns with Paceline.

A decode step is all work from a step's result to the next plan: reading the results, sending tokens to the session,
exchanging commits and extensions with the cache (the cache's time counts), making the next plan, and building all
protobuf messages. The column "with wire median" adds serialising and parsing these messages. vLLM's figures do not
include its serialising (pickle, msgpack).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cores import BLOCK_SIZE, Bench, Sample
from bench.peers.peer import Peer
from bench.peers.quiet import no_collections

RUNNING = (64, 256, 1024, 4096)
STEPS, STEPS_OF_4096 = 100, 30  # in each repeat
WARM_UP = 20
PROMPT, CACHED = 3_000, 2_000
ADMISSIONS = 60
BURST, BURST_PROMPT, BURST_CACHED = 1_000, 3_072, 2_048
WAITING = 10_000
ABORTS = {"fcfs": 100, "priority": 30}
REPEATS = 5

COUNTED = {
    "how": f"medians of {REPEATS} repeats, ours and the peer's in turns, each warmed up (except abort); garbage "
    "collector frozen and off in both; wall time of one thread, so time that other processes take shows first in p99",
    "us": "time of the scheduler's and the cache's cores; protobuf messages built, not serialised or parsed",
    "with_wire_us": "the same, and every message of the two services serialised and parsed",
    "decode": "from a step's result to the next plan; peer: schedule + update_from_output",
    "burst": f"{BURST} requests for one token each, submitted at once and run in steps of 8,192 tokens: from the "
    "submissions to the last end, per request; peer: requests made and hashed, add_request, schedule, "
    "update_from_output",
    "lone": "one request at a time: from the submission to the plan that runs it; whole: until its token "
    "arrives, its blocks are stored and it has ended; peer: request made and hashed, add_request, schedule; "
    "whole: also update_from_output",
    "abort": "from the cancel until the cache has freed the request's sequence; peer: finish_requests",
}


def spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Median, p10 and p99 in microseconds; None if there is nothing."""
    keys = (f"{name}_median", f"{name}_p10", f"{name}_p99")
    if not seconds:
        return dict.fromkeys(keys)
    values = (statistics.median(seconds), *np.percentile(seconds, [10, 99]))
    return {key: round(float(value) * 1e6, 1) for key, value in zip(keys, values, strict=True)}


def ours(prefix: str, samples: list[Sample]) -> dict[str, float | None]:
    cores = [sample["scheduler"] + sample["cache"] for sample in samples]
    return {
        **spread(f"{prefix}us", cores),
        **spread(f"{prefix}with_wire_us", [sum(sample.values()) for sample in samples]),
        f"{prefix}scheduler_us_median": spread("", [sample["scheduler"] for sample in samples])["_median"],
        f"{prefix}cache_us_median": spread("", [sample["cache"] for sample in samples])["_median"],
    }


def theirs(prefix: str, samples: list[dict[str, float]], what: str) -> dict[str, float | None]:
    return spread(f"peer_{prefix}us", [sample[what] for sample in samples])


def ratio(ours: float | None, peer: float | None) -> float | None:
    """Paceline's time as a share of the peer's time."""
    return None if ours is None or peer is None else round(ours / peer, 4)


def decode(running: int, steps: int, seed: int) -> list[Sample]:
    """Decode steps of sequences at random positions in their blocks. No sequence arrives or leaves."""
    rng = np.random.default_rng(seed)
    bench = Bench(running, running * (2 + (64 + steps + 200) // BLOCK_SIZE))
    for _ in range(running):
        bench.send(bench.submission(rng.integers(1, 1 << 29, rng.integers(17, 64)), 10_000))
    while len(bench.core.queue) or bench.core.workers[bench.worker].batch.prefills:
        bench.run_step()
    for _ in range(WARM_UP):
        bench.run_step()
    with no_collections():
        return [bench.measured(bench.run_step) for _ in range(steps)]


def with_a_prefix(seed: int, prompt: int, cached: int) -> tuple[Bench, Callable[[], bytes]]:
    """A bench with a cached prefix, and a function that makes submissions that begin with this prefix."""
    rng = np.random.default_rng(seed)
    bench = Bench(4096, 400_000)
    shared = rng.integers(1, 1 << 29, cached)

    def message() -> bytes:
        return bench.submission(np.concatenate((shared, rng.integers(1, 1 << 29, prompt - cached))), 1)

    for _ in range(WARM_UP):
        bench.send(message())
        bench.run_step()
    return bench, message


def lone(seed: int) -> list[tuple[Sample, Sample]]:
    """Requests with a cached prefix, one at a time: the time until the plan that runs each, and the time after it."""
    bench, message = with_a_prefix(seed, PROMPT, CACHED)
    with no_collections():
        return [(bench.measured(bench.send, message()), bench.measured(bench.run_step)) for _ in range(ADMISSIONS)]


def burst(seed: int) -> list[Sample]:
    """Many requests with a cached prefix at once, until the last has ended: seconds per request, as one sample."""
    bench, message = with_a_prefix(seed, BURST_PROMPT, BURST_CACHED)
    messages = [message() for _ in range(BURST)]

    def run() -> None:
        for submission in messages:
            bench.take_in(submission)
        bench.settle()
        while bench.plan is not None:
            bench.run_step()

    with no_collections():
        sample = bench.measured(run)
    assert not len(bench.core.queue), "a request has not run"
    return [{part: seconds / BURST for part, seconds in sample.items()}]


def abort(order: str, seed: int) -> list[Sample]:
    """Cancels requests at random positions in the queue, while the worker is full."""
    rng = np.random.default_rng(seed)
    bench = Bench(1, 100_000, preset="vllm-v1-priority" if order == "priority" else "")
    bench.send(bench.submission(rng.integers(1, 1 << 29, 32), 100_000, 10))
    for _ in range(WAITING):
        bench.send(bench.submission(rng.integers(1, 1 << 29, 32), 64, float(rng.integers(5))))
    handles = rng.permutation(np.arange(2, WAITING + 2))[: ABORTS[order]].tolist()
    cancels = [bench.cancel(handle) for handle in handles]
    with no_collections():
        return [bench.measured(bench.send, cancel) for cancel in cancels]


def in_turns(our_part: Callable[[int], list[Any]], peer: Peer, job: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    own: list[Any] = []
    other: list[Any] = []
    for seed in range(REPEATS):
        own += our_part(seed)
        other += peer.ask({**job, "seed": seed}) or []
    return own, other


def measure_decode(running: int, peer: Peer) -> dict[str, Any]:
    steps = STEPS if running < 4096 else STEPS_OF_4096
    job = {"what": "decode", "running": running, "steps": steps, "warm_up": WARM_UP}
    own, other = in_turns(lambda seed: decode(running, steps, seed), peer, job)
    row: dict[str, Any] = {"running": running, **ours("step_", own), **theirs("step_", other, "step")}
    return {**row, "ratio": ratio(row["step_us_median"], row["peer_step_us_median"])}


def measure_admission(peer: Peer) -> dict[str, Any]:
    """Copies the figures of the burst to the top level, too."""
    many = measure_burst(peer)
    top = {name: many[name] for name in ("us_median", "peer_us_median", "ratio")}
    return {**top, "burst": many, "lone": measure_lone(peer)}


def measure_burst(peer: Peer) -> dict[str, Any]:
    job = {"what": "burst", "prompt": BURST_PROMPT, "cached": BURST_CACHED, "requests": BURST}
    own, other = in_turns(burst, peer, job)
    row: dict[str, Any] = {
        "requests": BURST,
        "prompt_tokens": BURST_PROMPT,
        "cached_tokens": BURST_CACHED,
        **ours("", own),
        **theirs("", other, "whole"),
        **theirs("hashing_", other, "hashing"),
    }
    return {**row, "ratio": ratio(row["us_median"], row["peer_us_median"])}


def measure_lone(peer: Peer) -> dict[str, Any]:
    job = {"what": "lone", "prompt": PROMPT, "cached": CACHED, "times": ADMISSIONS}
    own, other = in_turns(lone, peer, job)
    row: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "cached_tokens": CACHED // BLOCK_SIZE * BLOCK_SIZE,
        **ours("", [first for first, _ in own]),
        **ours("whole_", [{part: first[part] + second[part] for part in first} for first, second in own]),
        **theirs("", other, "admission"),
        **theirs("hashing_", other, "hashing"),
        **theirs("whole_", other, "whole"),
    }
    shares = {f"{name}ratio": ratio(row[f"{name}us_median"], row[f"peer_{name}us_median"]) for name in ("", "whole_")}
    return {**row, **shares}


def measure_abort(order: str, peer: Peer) -> dict[str, Any]:
    job = {"what": "abort", "waiting": WAITING, "times": ABORTS[order], "order": order}
    own, other = in_turns(lambda seed: abort(order, seed), peer, job)
    row: dict[str, Any] = {"order": order, "waiting": WAITING, **ours("", own), **theirs("", other, "abort")}
    return {**row, "ratio": ratio(row["us_median"], row["peer_us_median"])}
