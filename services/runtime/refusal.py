"""How the scheduler refuses a worker's registration, so that the worker ends instead of dialling again."""

from __future__ import annotations

from typing import Any

import grpc.aio

_KEY = "refused-registration"


def to_metadata(field: str) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a link with a refused registration. `field`: the field at fault."""
    return ((_KEY, field),)


def is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """Whether a link ended because its registration was refused. A broken link or a standby's answer is no refusal."""
    trailers: Any = error.trailing_metadata() or ()  # pairs; the stubs do not declare that
    return any(key == _KEY for key, _ in trailers)
