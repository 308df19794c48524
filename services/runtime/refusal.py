"""How the scheduler tells a worker that it does not take it, so that the worker ends instead of dialling again."""

from __future__ import annotations

from typing import Any

import grpc.aio

_KEY = "refused-registration"


def to_metadata(field: str) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a link whose registration is refused for this field."""
    return ((_KEY, field),)


def is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """Whether a link ended because its registration was refused. A broken link or a standby's answer is no refusal."""
    trailers: Any = error.trailing_metadata() or ()  # pairs, which the stubs do not know
    return any(key == _KEY for key, _ in trailers)
