"""The settings of the cache service."""

from __future__ import annotations

from pydantic import Field

from cache_svc.core.memory.eviction import STRATEGIES
from cache_svc.core.memory.shares import TENANT_SHARE, TOTAL_SHARE
from services.runtime.keys.settings import KeySettings


class CacheSettings(KeySettings, section="cache"):
    """The cache: block tables, reference counts and the prefix tree of every worker."""

    port: int = Field(50052, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    metrics_port: int = Field(9102, ge=0, le=65535, description="port of Prometheus /metrics; 0 takes a free one")
    eviction: str = Field(
        "lru",
        pattern=f"^({'|'.join(STRATEGIES)})$",
        description=f"which unused blocks are evicted first: {', '.join(STRATEGIES)}",
    )
    event_buffer: int = Field(
        10_000, ge=1, le=10_000_000, description="events kept for watchers that read slowly or come back"
    )
    event_tokens: bool = Field(
        False, description="events contain the token ids of blocks: watchers then read the prompts of all users"
    )
    max_pinned_share: float = Field(0.5, ge=0.0, le=1.0, description="share of a worker's blocks that may be pinned")
    max_tenant_retained_share: float = Field(
        TENANT_SHARE,
        ge=0.0,
        le=1.0,
        description="share of the blocks of each memory (a worker's device, or its host memory) that cache_retention "
        "may keep for one tenant",
    )
    max_retained_share: float = Field(TOTAL_SHARE, ge=0.0, le=1.0, description="the same for all tenants together")
    debug: bool = Field(False, description="check every invariant after every operation (slow)")
