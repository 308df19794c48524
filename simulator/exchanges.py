"""What has to hold of every exchange between a scheduler and a cache, whoever plays them."""

from __future__ import annotations

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code
from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse


def check_exchange(cache: CacheCore, request: CacheServiceLinkRequest, response: CacheServiceLinkResponse) -> None:
    """Raises AssertionError. Only blocks may run short: any other refusal is a mistake of the scheduler, and would
    leak."""
    cache.check_invariants()
    for op, result in zip(request.ops, response.results, strict=True):
        kind, refused = op.WhichOneof("op"), result.HasField("error")
        short = kind in ("admit", "extend") or result.error.code in (Code.RESOURCE_EXHAUSTED, Code.ABORTED)
        assert short or not refused, f"the cache refused {kind}: {result.error.message}"
        assert not result.restore.refused, f"the cache refused to restore {result.restore.refused}"
