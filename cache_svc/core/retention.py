"""How long a request wants its tokens to be kept: TensorRT-LLM's KvCacheRetentionConfig.

A range of tokens has a priority and may have a duration. A block gets the range of its first token. A later request's
range for the same block replaces the earlier range. Exception: a priority above DEFAULT_RETENTION that another tenant
requested stays, unless the new priority is higher. A duration counts from the last use of the block, by any request. A
request without a range for the block changes neither priority nor duration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache_svc.core.errors import Code, OpError
from paceline.v1.common_pb2 import RetentionRange

DEFAULT_RETENTION = 35
MAX_RETENTION = 100
MAX_TOKENS = 2**32


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens start ... end - 1 of a sequence. `end` 0: all tokens from `start` on."""

    start: int
    end: int
    priority: int
    duration_ms: int


def read_ranges(ranges: Iterable[RetentionRange]) -> tuple[Range, ...]:
    """Raises OpError(INVALID_ARGUMENT) if ranges overlap, one is empty, or a priority is too high."""
    reached = 0
    for one in sorted(ranges, key=lambda r: r.start):
        if one.priority > MAX_RETENTION:
            raise OpError(Code.INVALID_ARGUMENT, f"retention.priority: {one.priority} is not within 0..{MAX_RETENTION}")
        if one.end and one.end <= one.start:
            raise OpError(Code.INVALID_ARGUMENT, f"retention.end: {one.end} is not after start, {one.start}")
        if one.start < reached:
            other = "another range, which begins before it or at the same token"
            raise OpError(Code.INVALID_ARGUMENT, f"retention.start: {one.start} lies within {other}")
        reached = one.end or MAX_TOKENS
    return tuple(Range(one.start, one.end, one.priority, one.duration_ms) for one in ranges)
