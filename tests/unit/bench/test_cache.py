"""The cache benchmark runs, and its workload hits and misses as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.cache.cache import Sizes, cache
from bench.cache.ours import OurCache
from bench.peers.cache_work import LENGTH, LONG, Work, store

FIGURES = ("match_hit_1024_us", "match_3000_us", "insert_1024_us", "evict_1024_at_32_us", "match_8_workers_1024_us")


def test_a_report_without_the_peer_has_our_figures(tmp_path: Path) -> None:
    sizes = Sizes(calls=32, evict=(32, 64), memory=64, times=16, repeats=1)
    with Console(quiet=True) as console:
        report = cache(tmp_path, console, sizes)
    for part in (report, report["block_size_1"]):
        assert all(part["ours"][figure] > 0 for figure in (*FIGURES, "step_256_us", "bytes_per_block"))
        assert part["sglang"] == {"bytes_per_block": None}


@pytest.mark.parametrize("block_size", [1, 16])
def test_each_part_of_the_workload_hits_as_planned(block_size: int) -> None:
    work = Work(num_sequences=32, times=8, seed=0)
    ours = OurCache(block_size, work.num_tokens)
    store(ours, work.sequences)
    store(ours, work.long)
    for sequences, stored in ((work.hits, LENGTH), (work.long_hits, LONG), (work.partial, 768), (work.misses, 0)):
        for tokens in sequences:
            _, depth, _ = ours.match(ours.key(tokens))
            assert depth * block_size == stored // block_size * block_size


def test_evict_frees_as_many_blocks_as_asked() -> None:
    work = Work(num_sequences=32, times=8, seed=0)
    ours = OurCache(16, work.num_tokens)
    store(ours, work.sequences)
    ours.fill_up()
    ours.evict(LENGTH)
    assert ours.device.evicted_blocks_total == LENGTH // 16
    shares = [len({tokens[:n].tobytes() for tokens in work.sequences}) for n in (512, 768, 1024)]
    assert shares == [4, 4, 32]  # 32 sequences in 4 sessions, which share 768 tokens
