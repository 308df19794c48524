"""Settings of the scheduler service."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings


class SchedulerSettings(ServiceSettings, section="scheduler"):
    """Where it listens, whom it calls, and the limits of queue and steps."""

    port: int = Field(50051, ge=0, le=65535, description="gRPC port for gateways, clients and workers; 0 picks one")
    metrics_port: int = Field(9101, ge=0, le=65535, description="Prometheus port; 0 picks one")
    cache: str = Field("127.0.0.1:50052", description="host:port of the cache service")
    window: int = Field(2, ge=1, le=8, description="steps in flight per worker")
    max_queued_requests: int = Field(4096, ge=1, description="waiting requests before new ones are refused")
    max_queued_tokens: int = Field(4_000_000, ge=1, description="waiting tokens before new requests are refused")
    worker_timeout_s: float = Field(10.0, gt=0, description="a worker that is silent for so long is taken for dead")
    watermark: float = Field(0.01, ge=0, lt=1, description="share of a pool kept free when a request is admitted")
    prefix_caching: bool = Field(True, description="reuse the KV of common prefixes")
