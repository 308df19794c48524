"""Builds the messages that the core reports."""

from __future__ import annotations

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from cache_svc.core.sequences.matching import MatchedTokens
from cache_svc.core.sequences.misses import NO_MISSES, Misses
from cache_svc.core.sequences.worker_blocks import PoolCounts
from paceline.v1 import cache_pb2 as pb


def add_matches(message: RepeatedCompositeFieldContainer[pb.WorkerMatch], matches: list[MatchedTokens]) -> None:
    """Append the matches to a repeated field of WorkerMatch. A match without host tokens leaves that field out."""
    for worker, num_tokens, num_referenced_tokens, num_host_tokens in matches:
        match = message.add(worker=worker, num_tokens=num_tokens, num_live_tokens=num_referenced_tokens)
        if num_host_tokens:
            match.num_host_tokens = num_host_tokens


def add_misses(granted: pb.AdmitResult, misses: Misses) -> None:
    """Adds what the cache knows about the tokens that were not reused. Usually it knows nothing."""
    if misses is NO_MISSES:
        return
    num_other, other, num_in_flight, num_evicted = misses
    if num_other:
        granted.num_other_worker_tokens, granted.other_worker = num_other, other
    if num_in_flight:
        granted.num_in_flight_tokens = num_in_flight
    if num_evicted:
        granted.num_evicted_tokens = num_evicted


def pool_counters(worker_id: int, counters: PoolCounts) -> pb.PoolCounters:
    """The counters of a worker's two pools as a message. All of them count blocks."""
    free, cached, used, evicted, free_host, cached_host, used_host = counters
    return pb.PoolCounters(
        worker=worker_id,
        free_blocks=free,
        cached_blocks=cached,
        used_blocks=used,
        evicted_blocks_total=evicted,
        free_host_blocks=free_host,
        cached_host_blocks=cached_host,
        used_host_blocks=used_host,
    )
