"""Runs the workload of cache_work.py on SGLang's prefix caches, as jobs of sglang_bench.py in SGLang's environment.

rust    UnifiedRadixCache on its Rust tree, the default of SGLang's server
python  UnifiedRadixCache on its Python tree
radix   RadixCache, an older class in Python
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from bench.peers.cache_work import WORKERS, Samples, Tokens, Work, bytes_of, measure_calls, measure_evict, store, timed
from bench.peers.quiet import no_collections

TREES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}


class Allocator:
    """Counts freed token slots and does no more. So SGLang's figures leave out the time of a free list. Our evict
    makes one call to the empty pool, and passes evicted blocks directly to the caller."""

    device = torch.device("cpu")
    freed = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self.freed += len(indices)

    def get_kvcache(self) -> None:
        return None


class SGLangCache:
    """One of SGLang's prefix caches, with its allocator."""

    def __init__(self, core: str, page_size: int) -> None:
        torch.set_num_threads(1)
        self.allocator = Allocator(page_size)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=page_size
        )
        if core == "radix":
            self.tree = RadixCache(params)
        else:
            params.tree_components = (ComponentType.FULL,)
            params.tree_core_backend = None if core == "rust" else core
            self.tree = UnifiedRadixCache(params)
            runs = type(self.tree.tree_core).__name__
            assert runs == TREES[core], f"{core}: SGLang fell back to {runs}"
        self.match = self.tree.match_prefix
        self.insert = self.tree.insert

    def key(self, tokens: Tokens) -> MatchPrefixParams:
        return MatchPrefixParams(key=RadixKey(array("q", tokens.tobytes())))

    def to_insert(self, tokens: Tokens) -> InsertParams:
        return InsertParams(key=RadixKey(array("q", tokens.tobytes())), value=torch.arange(len(tokens)))

    def inserted(self, made: InsertParams) -> None:
        pass

    def to_lock(self, tokens: Tokens) -> Any:
        return self.match(self.key(tokens)).last_device_node

    def lock_unlock(self, node: Any) -> None:
        self.tree.unlock(self.tree.lock(node))

    def lock_table_unlock(self, node: Any) -> None:
        lock = self.tree.lock(node)
        self.tree.path_device_indices(node)
        self.tree.unlock(lock)

    def fill_up(self) -> None:
        self.allocator.freed = 0

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=num_tokens))


def cache_calls(core: str, block_size: int, sequences: int, times: int, seed: int) -> Samples:
    return measure_calls(SGLangCache(core, block_size), Work(sequences, times, seed))


def cache_evict(core: str, block_size: int, sequences: int, times: int, seed: int) -> Samples:
    cache = SGLangCache(core, block_size)
    samples = measure_evict(cache, Work(sequences, times, seed))
    assert cache.allocator.freed, "the allocator got no evicted block back"
    return samples


def cache_memory(core: str, block_size: int, sequences: int, seed: int) -> float:
    return bytes_of(SGLangCache(core, block_size), Work(sequences, 1, seed), block_size)


def cache_workers(core: str, block_size: int, sequences: int, times: int, seed: int) -> Samples:
    """One tree per worker; each match asks all trees in turn."""
    work = Work(sequences, times, seed)
    holders = work.holders()
    caches = [SGLangCache(core, block_size) for _ in range(WORKERS)]
    for worker, cache in enumerate(caches):
        store(cache, [tokens for tokens, some in zip(work.sequences, holders, strict=True) if worker in some])
    matches = [cache.match for cache in caches]

    def match(key: Any) -> None:
        for match in matches:
            match(key)

    with no_collections():
        return {"match_8_workers_1024": timed(match, map(caches[0].key, work.hits))}


JOBS: dict[str, Callable[..., Any]] = {
    "calls": cache_calls,
    "evict": cache_evict,
    "memory": cache_memory,
    "workers": cache_workers,
}
