"""Reads the JSON body of a request, within bounds of size and time."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from services.gateway.errors import ApiError, invalid

# In an invalid JSON body up to this size, the error message names the field that has no valid number.
_MAX_LOOKED_THROUGH_BYTES = 2**16


# English has 4 to 5 bytes per token, token ids in JSON have at most 8, Chinese as \uXXXX escapes has 6 to 12. The
# minimum leaves space for schemas, lists of short prompts and small models.
_BYTES_PER_TOKEN = 32
_LEAST_BODY_BYTES, MOST_BODY_BYTES = 2**20, 16 * 2**20


def default_max_body_bytes(max_model_len: int) -> int:
    """The largest allowed request body, in bytes, for a model with this context length in tokens."""
    return min(max(_BYTES_PER_TOKEN * max_model_len, _LEAST_BODY_BYTES), MOST_BODY_BYTES)


class TooManyBodies(Exception):
    """The bodies of all requests together have more bytes than the gateway may hold."""


class Bodies:
    """Counts the bytes of request bodies from their first byte, and of gRPC messages once they are complete, until they
    have become token ids.

    When the sum is above `max_bytes`, the largest body that is still arriving is dropped. Otherwise a few clients that
    send most of a large body, and never its end, could block all other clients. A complete body is never dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_released = 0  # bytes released since the start
        self.arriving: dict[HeldBody, asyncio.Timeout] = {}

    def hold(self) -> HeldBody:
        """Start to count one more body."""
        return HeldBody(self)


class HeldBody:
    """The bytes of one body. The end of the context releases them."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._was_dropped = False
        self.num_bytes = 0

    @asynccontextmanager
    async def arriving(self, timeout_s: float) -> AsyncIterator[None]:
        """The context in which the body arrives. Raises TimeoutError after `timeout_s`, TooManyBodies if the body is
        dropped."""
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                self._bodies.arriving[self] = timeout
                yield
        except TimeoutError:
            if self._was_dropped:
                raise TooManyBodies from None
            raise
        finally:
            self._bodies.arriving.pop(self, None)

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more that have arrived. Raises TooManyBodies if the sum is above the limit and no body that
        is still arriving is larger than this one."""
        bodies = self._bodies
        self.num_bytes += num_bytes
        bodies.num_bytes += num_bytes
        while bodies.num_bytes > bodies.max_bytes:
            largest = max(bodies.arriving, key=lambda held: held.num_bytes, default=self)
            if largest.num_bytes <= self.num_bytes:
                raise TooManyBodies
            largest._drop()

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _drop(self) -> None:
        self._was_dropped = True
        self._release()
        self._bodies.arriving.pop(self).reschedule(asyncio.get_running_loop().time())

    def _release(self) -> None:
        self._bodies.num_released += self.num_bytes
        self._bodies.num_bytes -= self.num_bytes
        self.num_bytes = 0


async def read_body(request: Request, held: HeldBody, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read the body. Holds at most `max_bytes` and one network read of it.

    Raises ApiError 408 (too slow), 413 (too large), 415 (not JSON); ClientDisconnect; TooManyBodies.
    """
    _check_headers(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with held.arriving(timeout_s):
            return await _read(request, held, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from None


def decode_json(body: bytes) -> Any:
    """Decode a JSON body. Raises ApiError 400 if it is not JSON."""
    try:
        return _decode(body)
    except orjson.JSONDecodeError as error:
        name = _field_without_number(body)
        where = "" if name is None else f"{name} contains NaN or an infinite number, which JSON does not allow; "
        raise invalid(name, f"{where}the body is not valid JSON: {error}", code="invalid_json") from None


def _decode(body: bytes) -> Any:
    """Decode strict JSON: no NaN, Infinity, lone surrogates, byte order mark or deep nesting."""
    # Millions of new lists start the garbage collector again and again. That takes far longer than to decode, and there
    # is no garbage yet.
    collects = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        if collects:
            gc.enable()


def _field_without_number(body: bytes) -> str | None:
    """The first field with NaN or an infinite number (also 1e999). None if the body has another error, or is too large
    to be searched."""
    if len(body) > _MAX_LOOKED_THROUGH_BYTES:
        return None
    try:
        fields = json.loads(body)  # accepts NaN and Infinity
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((name for name, value in fields.items() if _lacks_number(value)), None)


def _lacks_number(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_lacks_number, entries))


async def _read(request: Request, held: HeldBody, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        held.add(len(part))
        if held.num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be application/json, not {kind[:80]!r}", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not supported", code="unsupported_media_type")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
