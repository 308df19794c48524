"""The parts of a request's metadata that decide how long the cache keeps its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from cache_svc.core.errors import Code, OpError
from cache_svc.core.retention import Range, read_ranges
from paceline.v1.common_pb2 import RetentionRange


class RequestMetadata(NamedTuple):
    """Priority, retention and tenant of a request."""

    priority: float = 0.0
    retention: tuple[Range, ...] = ()
    tenant: str = ""  # retained blocks count against the share of this tenant


NO_METADATA = RequestMetadata()


def read_metadata(priority: float, retention: Iterable[RetentionRange], tenant: str) -> RequestMetadata:
    """Raises OpError(INVALID_ARGUMENT)."""
    if not math.isfinite(priority):  # NaN has no place in the eviction order
        raise OpError(Code.INVALID_ARGUMENT, f"priority: {priority} is not a finite number")
    return RequestMetadata(priority, read_ranges(retention), tenant)
