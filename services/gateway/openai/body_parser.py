"""Decodes and checks JSON bodies: small ones on the event loop, large ones in a separate process.

A thread would not help: orjson holds the GIL while it decodes, and 10 MB of JSON objects take 0.5 s.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from services.gateway.engine.idempotency import body_fingerprint
from services.gateway.errors import ApiError, Gone
from services.gateway.http.body import decode_json
from services.gateway.openai import schema
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# A body within both limits takes at most 3 ms on the event loop. A longer body with few values stays there too, and its
# time grows with its length.
_INLINE_BYTES = 64 * 1024
_INLINE_VALUES = 8192
# The process for large bodies yields its core to other processes.
_NICENESS = 5

_Error = tuple[int, str, str | None, str | None]  # status, message, param and code of an ApiError


def is_small(body: bytes) -> bool:
    """Whether the event loop should decode this body: the body is short, or consists mostly of long texts."""
    if len(body) <= _INLINE_BYTES:
        return True
    data = np.frombuffer(body, np.uint8)
    num_values = sum(int(np.count_nonzero(data == mark)) for mark in b",[{")
    return num_values <= _INLINE_VALUES


def parse_body(cls: type[schema.R], body: bytes, max_model_len: int, kind: str) -> tuple[schema.R, bytes]:
    """The request in a body. With a `kind` also the fingerprint of the body's fields. Raises ApiError 400."""
    decoded = decode_json(body)
    request = cls.from_body(decoded, max_model_len)
    return request, body_fingerprint(kind, decoded) if kind else b""


class BodyParser:
    """Runs parse_body() for the event loop. The first large body starts the process for large bodies."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._one_at_a_time = asyncio.Lock()

    async def parse(
        self, cls: type[schema.R], body: bytes, max_model_len: int, *, kind: str = "", gone: Callable[[], bool]
    ) -> tuple[schema.R, bytes]:
        """Like parse_body(). Also raises Gone if `gone()` when the turn of a large body comes, and ApiError 503 if this
        body kills the process for large bodies."""
        if is_small(body):
            return parse_body(cls, body, max_model_len, kind)
        async with self._one_at_a_time:
            if gone():
                raise Gone
            # An old process may have died before this body came. If a new process dies, this body has killed it.
            for is_new in (self._executor is None, True):
                try:
                    parsed, error = await self._in_process(cls, body, max_model_len, kind)
                    break
                except BrokenProcessPool:
                    _log.error("the process that parses large bodies has died")
                    self.close()
                    if is_new:
                        raise ApiError(
                            503, "the process that parses large bodies has died", retry_after_s=1.0
                        ) from None
        if error is not None:
            status, message, param, code = error
            raise ApiError(status, message, param=param, code=code)
        assert parsed is not None
        return parsed

    async def _in_process(
        self, cls: type[schema.R], body: bytes, max_model_len: int, kind: str
    ) -> tuple[tuple[schema.R, bytes] | None, _Error | None]:
        """The result of _parse_in_process(). Raises BrokenProcessPool."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a fork would copy the locks of gRPC's threads
            self._executor = ProcessPoolExecutor(1, context, initializer=_begin)
        submitted = self._executor.submit(_parse_in_process, cls, body, max_model_len, kind)
        return await asyncio.wrap_future(submitted)

    def close(self) -> None:
        """End the process."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway handles Ctrl-C
    os.nice(_NICENESS)
    gc.freeze()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _parse_in_process(
    cls: type[schema.R], body: bytes, max_model_len: int, kind: str
) -> tuple[tuple[schema.R, bytes] | None, _Error | None]:
    """The result of parse_body(), or the arguments of its ApiError (which cannot be pickled)."""
    try:
        return parse_body(cls, body, max_model_len, kind), None
    except ApiError as error:
        return None, (error.status, error.message, error.param, error.code)
