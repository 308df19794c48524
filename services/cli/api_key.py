"""The API key that a command shows to a server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

API_KEY_ENV = "PACELINE_API_KEY"


def add_flag(parser: argparse.ArgumentParser, kind: str = "admin key") -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"{kind}, if the server has keys [env: {API_KEY_ENV}, which other users of this machine cannot read]",
    )


def key_of(arguments: argparse.Namespace) -> str:
    """The key of the flag or the environment; empty if there is none. Raises ValueError."""
    key: str = arguments.api_key or os.environ.get(API_KEY_ENV, "")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"--api-key (or {API_KEY_ENV}): a key has printable ASCII characters only")
    return key


def with_key(channel: grpc.Channel, arguments: argparse.Namespace) -> grpc.Channel:
    """The channel, with the key of key_of() in each call. Raises ValueError."""
    key = key_of(arguments)
    if not key:
        return channel
    return grpc.intercept_channel(channel, _ShowKey(key))


class _Details(NamedTuple):
    """The details of a call. gRPC declares only their interface."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _ShowKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, key: str) -> None:
        self._field = "authorization", f"Bearer {key}"

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, call: Any) -> _Details:
        metadata = [*(call.metadata or ()), self._field]
        return _Details(call.method, call.timeout, metadata, call.credentials, call.wait_for_ready, call.compression)
