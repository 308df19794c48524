"""Parts of grpc that grpc-stubs lack: the end of a stream, and calls with bytes or without an iterator of requests."""

from __future__ import annotations

from typing import Any

import grpc.aio

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def untyped(channel_or_stub: Any) -> Any:
    """The same object, without a type."""
    return channel_or_stub
