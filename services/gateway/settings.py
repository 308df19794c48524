"""Settings of the gateway."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from demo import CHECKPOINT
from services.gateway.store.urls import SQLITE, check_store_url
from services.runtime.keys.settings import KeySettings
from services.runtime.settings import Address, AddressList
from services.runtime.tls.settings import ClientTlsSettings
from services.runtime.tracing.settings import TracingSettings

# Every service that needs the model reads this variable: the gateway for the tokenizer, the worker for the weights.
MODEL_ENV = "PACELINE_MODEL"
DEMO_MODEL_NAME = "paceline-demo"


_HOST = re.compile(r"\*|(?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\]", re.IGNORECASE)


def _entries(value: str) -> list[str]:
    """The entries of a comma-separated list."""
    return [entry for part in value.split(",") if (entry := part.strip())]


def _hosts(value: str) -> str:
    for entry in _entries(value):
        if _HOST.fullmatch(entry) is None:
            raise ValueError(
                f"{entry[:100]!r} is no host: names or addresses without a port are possible, like example.com, "
                "*.example.com, 10.0.0.1 or [::1], and * for all"
            )
    return value


def _objectives(value: str) -> str:
    for entry in _entries(value):
        name, _, priority = entry.partition("=")
        try:
            is_number = math.isfinite(float(priority))
        except ValueError:
            is_number = False
        if not name.strip() or not is_number:
            raise ValueError(f"{entry[:100]!r} is no objective: name=priority is possible, like critical=10")
    return value


Objectives = Annotated[str, AfterValidator(_objectives)]
Hosts = Annotated[str, AfterValidator(_hosts)]
StoreUrl = Annotated[str, AfterValidator(check_store_url)]


class GatewaySettings(KeySettings, ClientTlsSettings, TracingSettings, section="gateway"):
    """The gateway: OpenAI-compatible HTTP, and gRPC, for clients."""

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    scheduler: AddressList = Field(
        "127.0.0.1:50051", description="host:port of the scheduler, or a comma-separated list (leader and standbys)"
    )
    cache: Address | Literal[""] = Field(
        "",
        description="host:port of the cache, for the live view's blocks and prefixes, and for outside routers that "
        "subscribe to KV events over gRPC; empty: neither",
    )
    model: str = Field(
        default_factory=lambda: os.environ.get(MODEL_ENV) or str(CHECKPOINT),
        description=f"checkpoint folder, or a hub name, for its tokenizer (default: {MODEL_ENV}, else the demo model)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of weights that the workers must serve; auto: any"
    )
    served_model_name: str | None = Field(None, description="name that clients use (default: the folder's or hub's)")
    chat_template: str | None = Field(None, description="chat template or its path (default: the checkpoint's)")
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="format of the model's tool calls; auto: what its chat template shows"
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"] = Field(
        "auto", description="format of the model's reasoning; auto: what its chat template shows"
    )
    trust_request_chat_template: bool = Field(
        False, description="run chat templates that requests bring; a hostile template can use a core for long"
    )
    enable_tokenizer_info: bool = Field(
        False, description="serve /tokenizer_info: the tokenizer's configuration and the chat template"
    )
    force_include_usage: bool = Field(
        False, description="usage in every event of a stream, also where the request does not ask for it"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="log probabilities name tokens by their ids, unless the request says otherwise"
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="prefix of paths behind a proxy that does not remove it; paths without it are served, too",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="prompt and output tokens of a request together (default: the worker's limit)"
    )
    max_body_bytes: int | None = Field(
        None,
        ge=1024,
        description="largest request body, and gRPC message (default: 32 bytes for each token of the model's context, "
        "from 1 to 16 MiB; 16 MiB for embeddings)",
    )
    max_bodies_bytes: int = Field(
        256 * 2**20,
        ge=1024,
        description="memory for all bodies that are being read or tokenised; a request above it gets 429",
    )
    log_requests: bool = Field(True, description="one line at info for each finished request")
    metrics_tenants: int = Field(
        32,
        ge=0,
        le=1000,
        description="the first tenants, up to this many, have their own metrics; all others share `other`",
    )
    metrics_tenant_names: str = Field(
        "", description="comma-separated names of tenants that always have their own metrics"
    )
    vllm_metrics: bool = Field(
        True, description="serve metrics under vLLM's names, too, for dashboards and routers made for vLLM"
    )
    max_live_requests: int = Field(
        4096,
        ge=1,
        description="online sequences in flight (a request with n=4 has 4), and as many offline ones; more get 429",
    )
    max_connections: int = Field(
        16384,
        ge=1,
        description="HTTP connections (at most the limit of open files, minus the gRPC connections and a reserve of up "
        "to 256); one more replaces a connection without a complete request or unsent answer, or gets 503",
    )
    max_grpc_connections: int = Field(
        4096,
        ge=1,
        description="gRPC connections; one more is closed at once (at most a quarter of the limit of open files)",
    )
    max_grpc_connections_per_client: int | None = Field(
        None,
        ge=1,
        description="gRPC connections of one client, an IPv4 address or an IPv6 network of 64 bits; one more is closed "
        "within a second (default: a quarter of max_grpc_connections, at least 16)",
    )
    max_connections_per_client: int | None = Field(
        None,
        ge=1,
        description="HTTP connections of one client, an IPv4 address or an IPv6 network of 64 bits; one more gets 429 "
        "(default: half of max_connections, at least 64; behind a proxy give it as many as max_connections)",
    )
    objectives: Objectives = Field(
        "",
        description="priorities of objectives that clients may name in x-llm-d-inference-objective, with commas, like "
        "critical=10,batch=-10",
    )
    open_metrics: bool = Field(False, description="with API keys, serve /metrics without a key")
    allowed_origins: str = Field(
        "", description="origins (with commas) of web pages that may call the HTTP API; *: all, empty: none"
    )
    allowed_hosts: Hosts = Field(
        "",
        description="names (with commas) under which clients may address the HTTP API, like example.com or "
        "*.example.com; *: all (default: those of loopback if `host` is on loopback, else all)",
    )
    head_timeout_s: float = Field(
        30.0, gt=0, description="seconds for the headers of a request; then the connection is closed"
    )
    send_timeout_s: float = Field(
        60.0, gt=0, description="seconds that an HTTP client may read nothing; then its connection is closed"
    )
    scheduler_wait_s: float = Field(
        30.0, ge=0, description="seconds that a request waits for an absent scheduler before it fails with 503"
    )

    resume_grace_s: float = Field(
        10.0, ge=0, description="seconds that a request with an idempotency key continues without its client"
    )
    resume_keep_s: float = Field(
        60.0, ge=0, description="seconds that a finished answer is kept for its idempotency key"
    )
    resume_keep_bytes: int = Field(
        64 * 2**20, ge=0, description="approximate memory for answers kept for idempotency keys"
    )

    response_store: StoreUrl = Field(
        SQLITE,
        description="where responses, files and batches are stored: none, sqlite (a file in the state folder), "
        "sqlite:///FILE, or redis://, rediss:// or unix:// for gateways on several machines",
    )
    response_ttl_s: float = Field(30 * 86400.0, ge=1, description="seconds after which a stored response is deleted")
    response_store_bytes: int = Field(
        2**30,
        ge=2**20,
        description="size of all responses in an SQLite store; above it, ended responses of the API key with the most "
        "bytes are deleted",
    )

    max_file_bytes: int = Field(200 * 2**20, ge=1024, description="largest file of /v1/files; a larger one gets 413")
    max_files_bytes: int = Field(
        2 * 2**30,
        ge=1024,
        description="size of all files of one API key and the results of its running batches; above it, uploads and "
        "new batches get 413, and running batches end",
    )
    file_ttl_s: float = Field(
        30 * 86400.0,
        ge=1,
        description="seconds until a file is deleted; a batch is deleted this long after its completion window",
    )
    batch_lines: int = Field(64, ge=1, description="requests of one batch in flight at this gateway")
    all_batch_lines: int = Field(256, ge=1, description="requests of all batches in flight at this gateway")

    @property
    def origins(self) -> list[str]:
        """The entries of allowed_origins."""
        return _entries(self.allowed_origins)

    @property
    def hosts(self) -> list[str]:
        """The entries of allowed_hosts, in lower case."""
        return _entries(self.allowed_hosts.lower())

    @property
    def objective_priorities(self) -> dict[str, float]:
        """The priorities in `objectives`, by name."""
        pairs = (entry.partition("=") for entry in _entries(self.objectives))
        return {name.strip(): float(priority) for name, _, priority in pairs}

    @property
    def tenant_names(self) -> list[str]:
        """The names in metrics_tenant_names."""
        return _entries(self.metrics_tenant_names)

    @property
    def public_root(self) -> str:
        """The model's name on a hub, or the name that clients use if its files are in a folder of this machine."""
        return self.model_name if Path(self.model).expanduser().is_dir() else self.model

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        if self.served_model_name:
            return self.served_model_name
        folder = Path(self.model).expanduser()
        if not folder.is_dir():
            return self.model
        return DEMO_MODEL_NAME if folder.resolve() == CHECKPOINT.resolve() else folder.resolve().name
