"""Settings of `paceline up`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from services.runtime.keys.settings import KeySettings
from services.runtime.settings import LogLevel
from services.runtime.tls.settings import ClientTlsSettings


class UpSettings(KeySettings, ClientTlsSettings, section="up"):
    """Start cache, scheduler, workers and gateway on this machine."""

    host: str = Field("127.0.0.1", description="address of the gateway; the other services stay on loopback")
    log_level: LogLevel = Field("warning", description="least severe level that the services log")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port of the gateway; 0 takes a free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port of the gateway")
    scheduler_port: int = Field(50051, ge=0, le=65535, description="gRPC port that workers dial")
    cache_port: int = Field(50052, ge=0, le=65535, description="gRPC port of the cache")
    metrics_port: int = Field(
        9101,
        ge=0,
        le=65535,
        description="port of the scheduler's /metrics; the next ones are the cache's and each worker's, and the "
        "gateway has its own at the HTTP port. 0 takes free ones",
    )
    model: str = Field("", description="checkpoint folder or hub name; empty: the built-in demo model")
    served_model_name: str = Field("", description="the name that clients use; empty: the folder's or the hub model's")
    workers: int = Field(1, ge=0, description="workers to start")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights from config.json alone")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="type of weights and KV")
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: matrices as int8 with a scale per output channel, on a CPU"
    )
    pooling: Literal["auto", "last", "mean"] = Field(
        "auto", description="serve embeddings with this pooling; auto: as the checkpoint says"
    )
    block_size: int = Field(16, ge=1, le=128, description="tokens in a KV block")
    num_blocks: int = Field(0, ge=0, description="KV blocks of each worker; 0: as memory allows")
    host_gib: float = Field(0.0, ge=0, description="host memory of each worker for preempted and evicted KV, in GiB")
    max_model_len: int = Field(0, ge=0, description="longest sequence; 0: the model's")
    window: int = Field(0, ge=0, le=8, description="steps in flight per worker; 0: 2, and 3 while its steps are short")
    speculative_tokens: int = Field(
        0, ge=0, le=64, description="most draft tokens of a sequence in a step (speculative decoding); 0: none"
    )
    preset: str = Field("", description="scheduling policies like those of a known system; empty: paceline's own")
    hang_s: float = Field(
        15.0, ge=0, description="seconds without an answer, after which a service is killed and started again; 0: never"
    )
    threads: int = Field(0, ge=0, description="torch threads of each worker; 0: as a worker chooses")

    @model_validator(mode="after")
    def _check_probes(self) -> Self:
        if self.tls_client_ca and not self.tls_dir:
            raise ValueError("--tls-client-ca needs --tls-dir: `up` shows its certificate when it asks the gateway")
        return self

    def flags(self, *names: str) -> list[str]:
        """Flags for the values that the user chose for `up`, except 0 and empty ones. Other values come from the
        service's own settings."""
        flags = []
        for name in names:
            value = getattr(self, name)
            if name in self.model_fields_set and value not in ("", 0, None):
                flags += [f"--{name.replace('_', '-')}", str(value)]
        return flags
