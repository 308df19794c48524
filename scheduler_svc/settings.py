"""Settings of the scheduler service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from scheduler_svc.core.types import CacheScope
from scheduler_svc.policies.presets import DEFAULT, PRESETS
from services.runtime.keys.settings import KeySettings
from services.runtime.settings import Address
from services.runtime.tracing.settings import TracingSettings


def _endpoints(value: str) -> str:
    endpoints = [part.strip().rstrip("/") for part in value.split(",")] if value else []
    for endpoint in endpoints:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port or endpoint.count("/") != 2:
            raise ValueError("must be http://host:port (or https), several with commas between them")
    return ",".join(endpoints)


Endpoints = Annotated[str, AfterValidator(_endpoints)]


class SchedulerSettings(KeySettings, TracingSettings, section="scheduler"):
    """Addresses of the scheduler and of its peers, and the limits of queue and steps."""

    port: int = Field(50051, ge=0, le=65535, description="gRPC port for gateways, clients and workers; 0 picks one")
    metrics_port: int = Field(9101, ge=0, le=65535, description="Prometheus port; 0 picks one")
    cache: Address = Field("127.0.0.1:50052", description="host:port of the cache service")
    etcd: Endpoints = Field(
        "", description="http://host:port of each etcd member, with commas: etcd elects one of several schedulers"
    )
    etcd_tls_dir: Path | None = Field(
        None,
        description="folder with ca.pem, cert.pem and key.pem for https endpoints of etcd (default: tls_dir; without "
        "either, the system's CAs and no certificate)",
    )
    etcd_key: str = Field(
        "paceline/scheduler",
        pattern=r"^[!-~]{1,200}$",
        description="prefix of the keys in etcd: the same for all schedulers of a server, different for each server",
    )
    etcd_ttl_s: int = Field(
        5,
        ge=2,
        le=60,
        description="seconds from the leader's last renewal to the next election; the leader itself ends before that",
    )
    window: int = Field(0, ge=0, le=8, description="steps in flight per worker; 0: 2, and 3 while its steps are short")
    max_queued_requests: int = Field(4096, ge=1, description="waiting online requests before new ones are refused")
    max_queued_tokens: int = Field(
        4_000_000, ge=1, description="tokens of waiting online requests before new ones are refused"
    )
    max_queued_offline_requests: int = Field(
        4096, ge=1, description="waiting offline requests before new ones are refused"
    )
    max_queued_offline_tokens: int = Field(
        4_000_000, ge=1, description="tokens of waiting offline requests before new ones are refused"
    )
    max_offline_tokens: int = Field(
        256, ge=0, description="most tokens of offline requests in a step with online requests; 0: none"
    )
    speculative_tokens: int = Field(
        0, ge=0, le=64, description="most draft tokens of a sequence in a step (speculative decoding); 0: none"
    )
    speculative_max_rows: int = Field(8, ge=1, description="if more sequences run on a worker, none of them speculates")
    speculative_ngram_max: int = Field(
        4, ge=1, le=64, description="longest run of last tokens that is looked up in the text before it, for drafts"
    )
    speculative_ngram_min: int = Field(2, ge=1, le=64, description="shortest run that is looked up, in tokens")
    poison_failures: int = Field(
        2, ge=1, description="a request fails if it was the only one in this many failed steps or lost workers in a row"
    )
    preset: str = Field(DEFAULT, description=f"scheduling policies: {', '.join(PRESETS)}")
    order: str = Field("", description="order policy on top of the preset: a name, or module:Class")
    capacity: str = Field("", description="capacity policy on top of the preset")
    batch: str = Field("", description="batch policy on top of the preset")
    preemption: str = Field("", description="preemption policy on top of the preset")
    placement: str = Field("", description="placement policy on top of the preset")
    policy_options: dict[str, Any] = Field(default_factory=dict, description="options of the policies, as JSON")
    max_num_seqs: int = Field(0, ge=0, description="running sequences per worker; 0: as many as the worker allows")
    tenant_max_running_tokens: int = Field(
        0,
        ge=0,
        description="tokens that the running requests of one tenant may grow to, online and offline ones each; a "
        "larger request runs alone; 0: any number",
    )
    tenant_max_queued_tokens: int = Field(
        0, ge=0, description="waiting tokens of one tenant, online and offline each; 0: any number"
    )
    waiting_timeout_s: float = Field(
        0, ge=0, description="seconds after which an online request that has never run fails; 0: never"
    )
    running_timeout_s: float = Field(
        0, ge=0, description="seconds from its first run after which an online request fails; 0: never"
    )
    no_worker_timeout_s: float = Field(
        30.0,
        ge=0,
        description="while no attached worker can hold it, a waiting request fails with 503 after this many seconds; "
        "0: never",
    )
    conversation_ttl_s: float = Field(
        300.0, gt=0, le=86400, description="seconds for which an idle conversation keeps its blocks and queue position"
    )
    allow_mixed_dtypes: bool = Field(
        False,
        description="accept workers with different data types: a request that changes workers may get other tokens",
    )
    prefix_caching: bool = Field(True, description="reuse the KV of common prefixes")
    cache_scope: CacheScope = Field(
        "tenant", description="tenant: only requests of one tenant share cached KV; server: requests of all tenants do"
    )
    cache_secret_file: str = Field(
        "",
        description="file with a secret of 16 to 64 bytes, the same for every standby. The scheduler hashes tenants "
        "and salts with it; workers and cache get only the hash (default: a secret in etcd, else a file that the "
        "scheduler makes in its state folder)",
    )
    partial_reuse: bool = Field(True, description="also reuse the beginning of a cached block, by a copy")
    host_cache: bool = Field(True, description="keep evicted KV in the workers' host memory, if they have any")

    @model_validator(mode="after")
    def _check_ngrams(self) -> Self:
        if self.speculative_ngram_max < self.speculative_ngram_min:
            raise ValueError(
                f"--speculative-ngram-max {self.speculative_ngram_max} is less than "
                f"--speculative-ngram-min {self.speculative_ngram_min}"
            )
        return self
