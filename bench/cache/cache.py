"""What the prefix cache's core costs, beside SGLang's caches at the same calls, in turns with ours."""

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
    """`calls`: sequences in the tree for all but evict and memory."""

    calls: int = 1_000
    evict: tuple[int, ...] = (1_000, 4_000, 20_000)
    memory: int = 20_000
    times: int = 100
    repeats: int = 5


HOW = {
    "all": "microseconds a call, median (and p10) over the repeats, ours and SGLang's in turns on the same sequences; "
    "garbage collector frozen and off in both; one thread; the first tenth of each repeat warms up. What a call "
    "is given (keys, values, messages) is made before. block_size is SGLang's page_size",
    "sequences": "1,024 tokens: 512 of one of 16 systems, 256 of a session (8 sequences), 256 of their own, in random "
    "order; 1,000 of them in the tree unless said, and 64 of 3,000 tokens (512 shared)",
    "match": "ours: PrefixTree.walk and Memory.held from the root; SGLang: match_prefix. Asked for one token more than "
    "is stored. partial: 768 are; miss: none",
    "insert_1024": "ours: Worker.store from the root; SGLang: insert. 768 tokens are there, 256 are new; new: none is "
    "there. insert_256_after_match: ours, of a sequence that stands where its match ended, as a commit does it",
    "evict": "ours: Memory.take of as many blocks with none free, the pool's time included; SGLang: evict, its "
    "allocator a stand-in that counts",
    "lock_unlock": "ours: use_path, which gives the path's blocks as well, and leave_path; SGLang: lock and unlock; "
    "table: and path_device_indices",
    "match_8_workers": "8 workers, each sequence on 1 to 3 of them. ours: CacheCore.exchange with 16 MatchOps, a "
    "sixteenth of it, messages and watches included; SGLang: match_prefix on 8 trees",
    "step_256": "ours only: CacheCore.exchange of a step with 256 running: an ExtendOp of 1/16 of them (all, at block "
    "size 1), a commit and free of one that ends, match and admission of 1,024 tokens with 768 stored",
    "bytes_per_block": "growth of a child process's resident memory over the distinct blocks of 20,000 sequences",
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
    """In a process that has nothing to reuse."""
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
        memory = [measure_memory(size, peer, sizes) for size in BLOCK_SIZES]  # before its process has memory to reuse
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
