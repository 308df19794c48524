"""The cache's Prometheus series.

A scrape reads everything but the duration from the core, so an exchange pays for one observation only.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_svc.core.cache import CacheCore

EXCHANGE_DURATION = Histogram(
    "paceline_cache_exchange_duration_seconds",
    "Time the core takes for one exchange of operations, without the link.",
    buckets=(10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 1.0),
)


class CacheCollector(Collector):
    """Reads the core from the thread that answers /metrics. This is safe, because it reads only integers, and pool
    counters as they were after a whole exchange."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "paceline_cache_blocks", "KV blocks by state: free, cached (reusable), used.", labels=["worker", "state"]
        )
        host_blocks = GaugeMetricFamily(
            "paceline_cache_host_blocks",
            "Host blocks by state: free, cached (reusable), used (by swapped-out sequences).",
            labels=["worker", "state"],
        )
        for pool in self._core.pool_counters():
            worker = str(pool.worker)
            blocks.add_metric([worker, "free"], pool.free_blocks)
            blocks.add_metric([worker, "cached"], pool.cached_blocks)
            blocks.add_metric([worker, "used"], pool.used_blocks)
            host_blocks.add_metric([worker, "free"], pool.free_host_blocks)
            host_blocks.add_metric([worker, "cached"], pool.cached_host_blocks)
            host_blocks.add_metric([worker, "used"], pool.used_host_blocks)
        yield blocks
        yield host_blocks
        yield GaugeMetricFamily("paceline_cache_pins", "Pinned prefixes.", value=len(self._core.pins.by_name))
        watchers = len(self._core.events.watchers)
        yield GaugeMetricFamily("paceline_cache_event_watchers", "Streams of WatchEvents.", value=watchers)
        counters = self._core.counters
        for name, text, value in (
            ("exchanges", "Exchanges of operations with the scheduler.", counters.exchanges),
            ("refused_ops", "Operations that were answered with an error.", counters.refused_ops),
            ("swapped_out_blocks", "Blocks of sequences copied to host memory.", counters.swapped_out_blocks),
            ("swapped_in_blocks", "Blocks of swapped-out sequences copied back.", counters.swapped_in_blocks),
            ("pins_given_up", "Times that a worker gave up all its pins for a request.", counters.pins_given_up),
            ("restored_sequences", "Sequences restored after the cache lost its state.", counters.restored_sequences),
            ("refused_claims", "Sequences with a refused restore entry.", counters.refused_claims),
            ("evicted_blocks", "Cached blocks that were taken for something else.", counters.evicted_blocks),
            (
                "evicted_host_blocks",
                "Cached host blocks taken for something else, or dropped because the block before them was lost.",
                counters.evicted_host_blocks,
            ),
            (
                "sharing_sequences",
                "Sequences admitted with blocks that another sequence computes in the same step.",
                counters.sharing_sequences,
            ),
            ("copied_blocks", "Blocks of which the beginning was reused, by copying it.", counters.copied_blocks),
            ("copied_host_blocks", "Copied blocks that were in host memory.", counters.copied_host_blocks),
            ("demoted_blocks", "Evicted blocks that were copied to host memory.", counters.demoted_blocks),
            ("demoted_tails", "Demoted blocks that were partial blocks.", counters.demoted_tails),
            ("promoted_blocks", "Blocks reused from host memory, copied back.", counters.promoted_blocks),
            ("prefix_query_tokens", "Tokens of admitted sequences.", counters.prefix_query_tokens),
            ("prefix_hit_tokens", "Tokens of admitted sequences with reused KV.", counters.prefix_hit_tokens),
        ):
            yield CounterMetricFamily(f"paceline_cache_{name}", text, value=value)
