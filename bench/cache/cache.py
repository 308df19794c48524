"""Measures the cost of the prefix cache's core. SGLang's caches run the same calls, in turns with ours."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cache import ours as cache_ours
from bench.cache.ours import OurCache
from bench.control_plane import ratio
from bench.machine import load_note, python_speed
from bench.peers.cache_work import Samples, Work, bytes_of, measure_calls, measure_evict
from bench.peers.peer import Peer

BLOCK_SIZES = (16, 1)
SGLANG = "sglang"  # its default core; the others are for comparison, at the first block size
CORES = {SGLANG: "rust", "sglang_python_core": "python", "sglang_radix_cache": "radix"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """`calls`: sequences in the tree for all figures but evict, memory and step_256."""

    calls: int = 1_000
    evict: tuple[int, ...] = (1_000, 4_000, 20_000)
    memory: int = 20_000
    times: int = 100
    repeats: int = 5


HOW = {
    "all": "microseconds a call, median (and p10) over the repeats; ours and SGLang's in turns on the same sequences; "
    "garbage collector frozen and off in both; one thread; the first tenth of each repeat warms up. The arguments of a "
    "call (keys, values, messages) are made before it is timed. block_size is SGLang's page_size",
    "sequences": "each has 1,024 tokens: 512 from one of 16 system prompts, 256 shared by a session of 8 sequences, "
    "256 its own. 1,000 sequences are stored, in random order, unless said otherwise. For match, insert and lock, 64 "
    "more of 3,000 tokens (512 shared) are stored",
    "match": "ours: PrefixTree.walk and Memory.held from the root; SGLang: match_prefix. The prompts have one token "
    "more than the stored sequences. partial: 768 of their tokens are stored; miss: none",
    "insert_1024": "ours: WorkerBlocks.store from the root; SGLang: insert. 768 tokens are stored before, 256 are new; "
    "insert_new: none is stored before. insert_256_after_match: ours only, the store of a commit: it begins where the "
    "sequence's match ended",
    "evict": "ours: Memory.take of the blocks of 1,024 tokens while none is free, including the pool's time; SGLang: "
    "evict, with a stand-in for its allocator that only counts",
    "lock_unlock": "ours: use_path, which also returns the path's blocks, and leave_path; SGLang: lock and unlock. "
    "lock_table_unlock: ours the same; SGLang also path_device_indices",
    "match_8_workers": "8 workers; each sequence is stored on 1 to 3 of them. ours: CacheCore.exchange with up to 16 "
    "MatchOps, divided by their number, with messages and prefix subscriptions, without a warm-up; SGLang: "
    "match_prefix on 8 trees",
    "step_256": "ours only: CacheCore.exchange of a step of 256 running sequences: an ExtendOp for 1/16 of them (at "
    "block size 1: for all). One sequence ends: commit and free. One arrives with 1,024 tokens, 768 of them stored: "
    "match and admit",
    "bytes_per_block": "growth of a child's resident memory, divided by the distinct blocks of 20,000 sequences",
}


def our_calls(block_size: int, sequences: int, times: int, seed: int) -> Samples:
    work = Work(sequences, times, seed)
    cache = OurCache(block_size, work.num_tokens)
    return {**measure_calls(cache, work), **cache_ours.measure_insert_rest(cache, work)}


def our_evict(block_size: int, sequences: int, times: int, seed: int) -> Samples:
    work = Work(sequences, times, seed)
    return measure_evict(OurCache(block_size, work.num_tokens), work)


def our_memory(block_size: int, sequences: int, seed: int) -> float:
    work = Work(sequences, 1, seed)
    return bytes_of(OurCache(block_size, work.num_tokens), work, block_size)


def our_memory_apart(block_size: int, sequences: int, seed: int) -> float:
    """Runs our_memory in a new process, which has no freed memory to reuse."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(our_memory, (block_size, sequences, seed))


OURS: dict[str, Callable[..., Samples]] = {
    "calls": our_calls,
    "evict": our_evict,
    "workers": cache_ours.measure_workers,
}


def cores(block_size: int) -> dict[str, str]:
    return CORES if block_size == BLOCK_SIZES[0] else {SGLANG: CORES[SGLANG]}


def measure_memory(block_size: int, peer: Peer, sizes: Sizes) -> dict[str, float | None]:
    job = {"block_size": block_size, "sequences": sizes.memory, "seed": 0}
    theirs = {name: peer.ask({"what": "memory", "core": core, **job}) for name, core in cores(block_size).items()}
    return {"ours": our_memory_apart(block_size, sizes.memory, 0), **theirs}


def in_turns(block_size: int, peer: Peer, sizes: Sizes) -> dict[str, Samples]:
    """The samples by system, then by figure."""
    samples: dict[str, Samples] = {name: {} for name in ("ours", *cores(block_size))}

    def add(name: str, some: Samples | None) -> None:
        for figure, values in (some or {}).items():
            samples[name].setdefault(figure, []).extend(values)

    jobs = [("calls", sizes.calls), *(("evict", count) for count in sizes.evict), ("workers", sizes.calls)]
    for seed in range(sizes.repeats):
        for what, sequences in jobs:
            job = {"block_size": block_size, "sequences": sequences, "times": sizes.times, "seed": seed}
            add("ours", OURS[what](**job))
            for name, core in cores(block_size).items():
                add(name, peer.ask({"what": what, "core": core, **job}))
        add("ours", cache_ours.measure_step(block_size, sizes.times, seed))
    return samples


def summary(samples: Samples) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, values in samples.items():
        figures[f"{name}_us"] = round(statistics.median(values), 2)
        figures[f"{name}_us_p10"] = round(float(np.percentile(values, 10)), 2)
    return figures


def measure(block_size: int, peer: Peer, memory: dict[str, float | None], sizes: Sizes) -> dict[str, Any]:
    systems = {name: summary(samples) for name, samples in in_turns(block_size, peer, sizes).items()}
    for name, value in memory.items():
        systems[name]["bytes_per_block"] = None if value is None else round(value, 1)
    ours, sglang = systems["ours"], systems[SGLANG]
    return {**systems, "ratio": {figure: ratio(ours[figure], sglang[figure]) for figure in ours if figure in sglang}}


def cache(environments: Path, console: Console, sizes: Sizes | None = None) -> dict[str, Any]:
    """The report: `ours` and `sglang` at block size 16; at 1 under `block_size_1`."""
    load, first_speed = os.getloadavg()[0], python_speed()
    sizes = sizes or Sizes()
    peer = Peer("sglang", environments)
    try:
        # First, while the peer's process has no freed memory to reuse.
        memory = [measure_memory(size, peer, sizes) for size in BLOCK_SIZES]
        first, second = (measure(size, peer, some, sizes) for size, some in zip(BLOCK_SIZES, memory, strict=True))
    finally:
        peer.close()
    report = {
        "note": load_note(load),
        "how": HOW,
        "peers": {peer.name: peer.version},
        "loop_us": [first_speed, python_speed()],
        "block_size": BLOCK_SIZES[0],
        **first,
        f"block_size_{BLOCK_SIZES[1]}": second,
    }
    show(report, console)
    for line in filter(None, (report["note"], peer.absent)):
        console.print(line)
    return report


def show(report: dict[str, Any], console: Console) -> None:
    second = report[f"block_size_{BLOCK_SIZES[1]}"]
    for block_size, part in zip(BLOCK_SIZES, (report, second), strict=True):
        table = Table(title=f"Prefix cache, µs a call, block size {block_size}", title_justify="left")
        systems = [name for name in ("ours", *CORES) if name in part]
        for column in ("", "ours", "p10", *systems[1:], "ours/sglang"):
            table.add_column(column, justify="right" if column else "left")
        for name in part["ours"]:
            if not name.endswith("_p10"):
                own = [part["ours"][name], part["ours"].get(f"{name}_p10")]
                values = own + [part[system].get(name) for system in systems[1:]]
                share = part["ratio"].get(name)
                cells = ["-" if value is None else f"{value:,.1f}" for value in values]
                table.add_row(name.removesuffix("_us"), *cells, "-" if share is None else f"{share:.2f}")
        console.print(table)
    for name, what in report["how"].items():
        console.print(f"{name}: {what}", highlight=False)
