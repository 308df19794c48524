"""The plan of `paceline up`: which services it starts, with which flags and which environment."""

from __future__ import annotations

import os

from services.cli.parent import PARENT_ENV
from services.cli.up.child import Child
from services.cli.up.ports import LOOPBACK, Ports, worker_names
from services.cli.up.settings import UpSettings
from services.runtime.settings import CONFIG_ENV


def plan(settings: UpSettings, ports: Ports, *, is_terminal: bool) -> list[Child]:
    """The services, in the order of their start. `is_terminal`: a person reads the output of `up`."""
    s = settings
    common = ["--log-level", s.log_level, "--drain-s", str(s.drain_s)]
    # The services write to a pipe, and only `up` knows whether it writes to a terminal.
    common += ["--log-format", "human" if s.log_format == "auto" and is_terminal else s.log_format]

    common += s.flags("tls_dir")

    def inside(name: str) -> list[str]:
        return [*common, "--host", LOOPBACK, "--metrics-port", str(ports.metrics[name])]

    dial = ["--scheduler", ports.scheduler_address]
    cache = [*inside("cache"), "--port", str(ports.cache), *s.flags("keys_file")]
    scheduler = [*inside("scheduler"), "--port", str(ports.scheduler), "--cache", ports.cache_address]
    scheduler += s.flags("window", "speculative_tokens", "preset", "keys_file")
    worker = [*dial, *worker_flags(s)]  # below each worker gets a --name, so that `top` and the page know it again
    gateway = [*common, *dial, "--cache", ports.cache_address, "--host", s.host]
    gateway += ["--port", str(ports.http), "--grpc-port", str(ports.grpc)]
    gateway += s.flags("model", "served_model_name", "max_model_len", "dtype", "keys_file")
    gateway += ["--insecure"] if s.insecure else []
    gateway += [*s.flags("http_cert", "http_key", "tls_client_ca"), *([] if s.http_tls else ["--no-http-tls"])]
    return [
        Child("cache", "cache", cache, ports.cache_address),
        Child("scheduler", "scheduler", scheduler, ports.scheduler_address),
        *[
            Child(name, "worker", [*inside(name), "--name", name, *worker, "--port", str(port)], f"{LOOPBACK}:{port}")
            for name, port in zip(worker_names(s.workers), ports.workers, strict=True)
        ],
        Child("gateway", "gateway", gateway, f"{ports.address}:{ports.grpc}"),
    ]


def worker_flags(settings: UpSettings) -> list[str]:
    """What each worker is told of the model, its memory and its cores."""
    model = settings.flags("model", "load_format", "dtype", "quantization", "pooling", "block_size", "num_blocks")
    shared = ["--local-workers", str(settings.workers)] if settings.workers > 1 else []
    return model + settings.flags("host_gib", "max_model_len", "threads") + shared


def environment(settings: UpSettings) -> dict[str, str]:
    """The environment of the services."""
    file = settings.config_file
    config = {CONFIG_ENV: os.path.abspath(file)} if file else {}
    return {**os.environ, **config, PARENT_ENV: str(os.getpid())}
