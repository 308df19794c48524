"""What a request says of how the cache keeps its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from cache_svc.core.errors import Code, OpError
from cache_svc.core.retention import Range, read_ranges
from paceline.v1.common_pb2 import RetentionRange


class RequestMetadata(NamedTuple):
    """What a request asked for, of how its blocks are kept."""

    priority: float = 0.0
    retention: tuple[Range, ...] = ()
    tenant: str = ""  # what is retained counts against its share


NO_METADATA = RequestMetadata()


def read_metadata(priority: float, retention: Iterable[RetentionRange], tenant: str) -> RequestMetadata:
    """Raises OpError(INVALID_ARGUMENT)."""
    if not math.isfinite(priority):  # what compares with nothing has no place in the order of eviction
        raise OpError(Code.INVALID_ARGUMENT, f"priority: {priority} is not a finite number")
    return RequestMetadata(priority, read_ranges(retention), tenant)
