"""How often a prefix cache of a given size hits, on a public trace: the core's tree and memory, request after request.

    python -m bench.cache.replay conversation_trace.jsonl --plot docs/img/cache-hit-rates.png

The trace is Mooncake's (a line a request, gzip or plain): `hash_ids` are the request's blocks of 512 tokens. An id
stands for its block and all blocks before it. Each id is replayed as one block: a token of its own, at block size 1. A
request comes when the one before has ended. So the replay measures the choice of blocks to keep, not how many requests
fit at once. Generated tokens are not in the trace and are not stored. A hit is a block that is already stored when its
request comes. The hit rate is the share of hits among all blocks of all requests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cache_svc.core.request_metadata import NO_METADATA
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import Namespace, PrefixSubscription
from cache_svc.core.tree.tree import PrefixTree

RESULTS = Path(__file__).parents[1] / "results" / "cache_replay.json"
BLOCK_TOKENS = 512
POOLS = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000, 500_000)
# All but "priority", because the trace has no priorities.
EVICTIONS = ("lru", "lfu", "slru", "fifo")
# Every request must compute at least one token. This token follows the trace's tokens, so all of these can be hits.
COMPUTED = np.array([-1], np.int32).tobytes()

Requests = list[list[int]]


def read(path: Path) -> Requests:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def bound(requests: Iterable[list[int]]) -> tuple[int, int]:
    """The number of hits in a cache that evicts nothing, and the number of all blocks."""
    seen: set[int] = set()
    hits = blocks = 0
    for ids in requests:
        hits += next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        blocks += len(ids)
        seen.update(ids)
    return hits, blocks


def replay(requests: Iterable[list[int]], num_blocks: int, eviction: str) -> int:
    """How many blocks are hits."""
    tree = PrefixTree(block_size=1)
    root = tree.acquire_root(Namespace())
    worker = WorkerBlocks(1, 0, tree, num_blocks + 1, True, False, 0, False, eviction)  # + 1: for COMPUTED
    hits = 0
    for number, ids in enumerate(requests):
        tokens = np.array(ids, np.int32).tobytes() + COMPUTED
        subscription = PrefixSubscription(number, tokens, Namespace(), NO_METADATA)
        subscription.root = root
        sequence = worker.admit(subscription, *tree.walk(tokens, root, 0), num_new_tokens=0, copies=False).sequence
        hits += sequence.num_computed_tokens
        sequence.num_computed_tokens = len(ids)
        worker.store(sequence)
        worker.release(sequence)
    return hits


def measure(requests: Requests, pools: Iterable[int], evictions: Iterable[str]) -> dict[str, Any]:
    hits, blocks = bound(requests)
    rows = []
    for num_blocks in pools:
        for eviction in evictions:
            rate = replay(requests, num_blocks, eviction) / blocks
            row = {"blocks": num_blocks, "tokens": num_blocks * BLOCK_TOKENS, "eviction": eviction}
            rows.append({**row, "hit_rate": round(rate, 4), "of_bound": round(rate * blocks / hits, 4)})
    return {"requests": len(requests), "blocks": blocks, "bound": round(hits / blocks, 4), "rows": rows}


def show(report: dict[str, Any], console: Console) -> None:
    title = f"{report['requests']:,} requests, {report['blocks']:,} blocks; with room for all: {report['bound']:.1%}"
    table = Table(title=title, title_justify="left")
    for column in ("pool, blocks", "tokens", "eviction", "hit rate", "of the bound"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        shares = (f"{row['hit_rate']:.1%}", f"{row['of_bound']:.1%}")
        table.add_row(f"{row['blocks']:,}", f"{row['tokens']:,}", row["eviction"], *shares)
    console.print(table)


def plot(report: dict[str, Any], path: Path) -> None:
    """Needs matplotlib: `pip install -c constraints.txt -e '.[bench]'`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    # Each line is thinner than the one before, because two lines may overlap.
    for width, eviction in zip(range(6, 0, -1), dict.fromkeys(row["eviction"] for row in report["rows"]), strict=False):
        rows = [row for row in report["rows"] if row["eviction"] == eviction]
        sizes = [row["blocks"] for row in rows]
        axes.plot(sizes, [row["hit_rate"] * 100 for row in rows], marker="o", lw=width, ms=2 * width, label=eviction)
    axes.axhline(report["bound"] * 100, color="grey", linestyle="--", label="room for all")
    axes.set(xscale="log", ylim=(0, None), ylabel="hit rate, % of blocks")
    axes.set_xlabel(f"pool, blocks of {BLOCK_TOKENS} tokens")
    axes.set_xticks(sizes, [f"{size / 1000:g}k" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.cache.replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids, gzip or plain")
    parser.add_argument("--pools", type=int, nargs="+", default=POOLS, help="blocks")
    parser.add_argument("--eviction", nargs="+", choices=EVICTIONS, default=EVICTIONS)
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    report = {"trace": options.trace.name, **measure(read(options.trace), options.pools, options.eviction)}
    show(report, console)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(report, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
