"""With `lru` the replay has exactly the hits of a plain LRU list of single blocks."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from bench.cache.replay import Requests, bound, main, replay


def made_up(seed: int) -> Requests:
    """Chains that branch off earlier ones: an id stands for a block and all before it."""
    rng = np.random.default_rng(seed)
    requests: Requests = []
    fresh = 0
    for _ in range(300):
        ids: list[int] = []
        if requests and rng.random() < 0.7:
            before = requests[-1 - int(rng.integers(min(len(requests), 40)))]
            ids = before[: 1 + int(rng.integers(len(before)))]
        num_new = 1 + int(rng.integers(12))
        ids = [*ids, *range(fresh, fresh + num_new)][:30]
        fresh += num_new
        requests.append(ids)
    return requests


def least_recently_used(requests: Requests, num_blocks: int) -> int:
    unused: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in requests:
        cached = next((i for i, block in enumerate(ids) if block not in unused), len(ids))
        hits += cached
        for block in ids[:cached]:
            del unused[block]
        while len(unused) > num_blocks - len(ids):
            unused.popitem(last=False)
        unused.update(dict.fromkeys(reversed(ids)))
    return hits


@pytest.mark.parametrize("num_blocks", [30, 50, 200, 1_000])
@pytest.mark.parametrize("seed", range(5))
def test_lru_hits_as_a_list_of_single_blocks_does(seed: int, num_blocks: int) -> None:
    requests = made_up(seed)
    assert replay(requests, num_blocks, "lru") == least_recently_used(requests, num_blocks)


def test_a_pool_with_room_for_all_blocks_has_all_possible_hits() -> None:
    requests = made_up(0)
    hits, blocks = bound(requests)
    assert replay(requests, blocks, "lru") == hits


def test_the_command_writes_its_measurements(tmp_path: Path) -> None:
    trace, results = tmp_path / "trace.jsonl.gz", tmp_path / "results.json"
    with gzip.open(trace, "wt") as lines:
        lines.writelines(json.dumps({"hash_ids": ids}) + "\n" for ids in made_up(0))
    assert main([str(trace), "--eviction", "lru", "--pools", "30", "10000", "--results", str(results)]) == 0
    report = json.loads(results.read_text())
    assert [row["blocks"] for row in report["rows"]] == [30, 10_000]
    assert report["rows"][1]["of_bound"] == 1.0 > report["rows"][0]["of_bound"] > 0
