"""Clients for InferenceService.Generate and Embed, blocking and asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import grpc.aio

from paceline.v1 import inference_pb2_grpc
from services.client.continuation import Attempts, Continuation, Misplaced, ended_early
from services.client.types import (
    EmbedOptions,
    EmbedResult,
    Messages,
    Options,
    PacelineError,
    Piece,
    Result,
    embed_result_from,
    error_from,
    make_embed_request,
    make_request,
    result_from,
)

PING_TIMEOUT_S = 5.0
PINGED_AFTER = 0.4  # a connection is pinged after this share of the ping timeout without data
RETRY_FOR_S = 30.0
API_KEY_ENV = "PACELINE_API_KEY"


def _channel_options(ping_timeout_s: float) -> list[tuple[str, int]]:
    timeout_ms = int(1000 * ping_timeout_s)
    return [
        ("grpc.keepalive_time_ms", int(PINGED_AFTER * timeout_ms)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # This is grpc core's option for the timeout of a ping (grpc/grpc#39239).
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        # A call sends its request and then only listens. By default grpc core stops pinging after two pings without
        # data.
        ("grpc.http2.max_pings_without_data", 0),
        # Despite its name, this is the timeout of a connection attempt. A frozen server's kernel accepts connections.
        ("grpc.min_reconnect_backoff_ms", timeout_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", 16 * 2**20),
        ("grpc.max_send_message_length", 16 * 2**20),
    ]


def _key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...] | None:
    key = os.environ.get(API_KEY_ENV, "") if api_key is None else api_key
    return (("authorization", f"Bearer {key}"),) if key else None


def _targets(target: str | Sequence[str]) -> Sequence[str]:
    targets = [target] if isinstance(target, str) else target
    if not targets:
        raise TypeError("at least one target is required")
    return targets


def _aio_failure(error: grpc.aio.AioRpcError) -> PacelineError:
    trailers: Any = error.trailing_metadata()
    failure = error_from(error.code(), error.details(), trailers)
    failure.__cause__ = error
    return failure


class PacelineClient:
    """A blocking client of a gateway's gRPC port (or of a scheduler's: token ids only). Threads may share it.

    >>> with PacelineClient("127.0.0.1:8001") as client:                                        # doctest: +SKIP
    ...     print(client.generate("Once there was a fox", max_tokens=20, temperature=0).text)
    ...     for piece in client.stream(messages=[{"role": "user", "content": "Hi!"}]):
    ...         print(piece.text, end="", flush=True)

    `target`: host:port, or several of them. When a server goes away in the middle of an answer, the next server
    continues after the last token that has arrived. This may take up to `retry_for_s` without a new token (0: never
    retry). A silent connection is pinged, and counts as lost after `ping_timeout_s` without an answer. This timeout
    must be longer than the transfer of the longest prompt, because a ping waits behind the prompt.

    `api_key`: for a server with API keys; None takes the variable PACELINE_API_KEY, if it is set.
    `credentials`: for a server with TLS, such as `grpc.ssl_channel_credentials(Path("ca.pem").read_bytes())`.

    Every method raises PacelineError or a subclass if the request fails. For wrong arguments it raises TypeError,
    ValueError (a token id of a prompt, or a number of `beam` or `cache_retention`, out of range) or KeyError (a message
    without role or content). `timeout_s` is a deadline for the whole answer.
    """

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:8001",
        *,
        model: str = "",
        retry_for_s: float = RETRY_FOR_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = _channel_options(ping_timeout_s)
        self._metadata = _key_metadata(api_key)
        self._channels = [
            grpc.secure_channel(one, credentials, options=options)
            if credentials is not None
            else grpc.insecure_channel(one, options=options)
            for one in _targets(target)
        ]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._first = 0  # the target that answered last
        self._model = model
        self._retry_for_s = retry_for_s
        self._closed = threading.Event()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """The whole answer to a prompt, a chat or token ids."""
        pieces = self.stream(prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **options)
        return result_from(list(pieces))

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Piece]:
        """The answer as it arrives. Closing the iterator cancels the request."""
        request = make_request(prompt, messages, token_ids, self._model, options)
        clock = time.monotonic
        going = Continuation(request, retry_for_s=self._retry_for_s, timeout_s=timeout_s, now_s=clock())
        target = self._first
        while not going.ended:
            message, left_s = going.call(clock())
            call: Any = self._stubs[target].Generate(message, timeout=left_s, metadata=self._metadata)
            failure: PacelineError = ended_early()
            try:
                for response in call:
                    piece = going.take(response, clock())
                    self._first = target
                    yield piece
            except Misplaced as error:
                failure = error
            except grpc.RpcError as error:
                failure = error_from(call.code(), call.details(), call.trailing_metadata())
                failure.__cause__ = error
            finally:
                call.cancel()
            if not going.ended:
                if self._closed.is_set() or self._closed.wait(going.pause_s(failure, clock())):
                    raise failure
                target = (target + 1) % len(self._stubs)

    def embed(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> EmbedResult:
        """The vector of a text or of token ids, by an embedding model. A broken call is sent to the next target."""
        request = make_embed_request(text, token_ids, self._model, options)
        clock = time.monotonic
        going = Attempts(request, retry_for_s=self._retry_for_s, timeout_s=timeout_s, now_s=clock())
        target = self._first
        while True:
            message, left_s = going.call(clock())
            call: Any = self._stubs[target].Embed.future(message, timeout=left_s, metadata=self._metadata)
            try:
                result = embed_result_from(call.result())
                self._first = target
                return result
            except grpc.RpcError as error:
                failure = error_from(call.code(), call.details(), call.trailing_metadata())
                failure.__cause__ = error
            except grpc.FutureCancelledError as error:  # the server has cancelled the call, or close() has
                failure = error_from(grpc.StatusCode.CANCELLED, call.details(), None)
                failure.__cause__ = error
            finally:
                call.cancel()
            if self._closed.is_set() or self._closed.wait(going.pause_s(failure, clock())):
                raise failure
            target = (target + 1) % len(self._stubs)

    def close(self) -> None:
        """Close the connections, and cancel running requests."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> PacelineClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncPacelineClient:
    """The asyncio client.

    >>> async with AsyncPacelineClient("127.0.0.1:8001") as client:                             # doctest: +SKIP
    ...     result = await client.generate(messages=[{"role": "user", "content": "Hi!"}], seed=7)
    ...     async for piece in client.stream("Once there was a fox", stop=["."]):
    ...         print(piece.text, end="", flush=True)
    """

    def __init__(
        self,
        target: str | Sequence[str] = "127.0.0.1:8001",
        *,
        model: str = "",
        retry_for_s: float = RETRY_FOR_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = _channel_options(ping_timeout_s)
        self._metadata = _key_metadata(api_key)
        self._channels = [
            grpc.aio.secure_channel(one, credentials, options=options)
            if credentials is not None
            else grpc.aio.insecure_channel(one, options=options)
            for one in _targets(target)
        ]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._first = 0  # the target that answered last
        self._model = model
        self._retry_for_s = retry_for_s
        self._closed = False

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """The whole answer to a prompt, a chat or token ids."""
        pieces = self.stream(prompt, messages=messages, token_ids=token_ids, timeout_s=timeout_s, **options)
        return result_from([piece async for piece in pieces])

    async def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[Piece]:
        """The answer as it arrives. Closing the iterator cancels the request."""
        request = make_request(prompt, messages, token_ids, self._model, options)
        clock = time.monotonic
        going = Continuation(request, retry_for_s=self._retry_for_s, timeout_s=timeout_s, now_s=clock())
        target = self._first
        while not going.ended:
            message, left_s = going.call(clock())
            call: Any = self._stubs[target].Generate(message, timeout=left_s, metadata=self._metadata)
            failure: PacelineError = ended_early()
            try:
                async for response in call:
                    piece = going.take(response, clock())
                    self._first = target
                    yield piece
            except Misplaced as error:
                failure = error
            except grpc.aio.AioRpcError as error:
                failure = _aio_failure(error)
            except asyncio.CancelledError as error:
                failure = await self._cancelled_by_server(call, error)
            finally:
                call.cancel()
            if not going.ended:
                await asyncio.sleep(going.pause_s(failure, clock()))
                target = (target + 1) % len(self._stubs)

    async def embed(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> EmbedResult:
        """The vector of a text or of token ids, by an embedding model. A broken call is sent to the next target."""
        request = make_embed_request(text, token_ids, self._model, options)
        clock = time.monotonic
        going = Attempts(request, retry_for_s=self._retry_for_s, timeout_s=timeout_s, now_s=clock())
        target = self._first
        while True:
            message, left_s = going.call(clock())
            call: Any = self._stubs[target].Embed(message, timeout=left_s, metadata=self._metadata)
            try:
                result = embed_result_from(await call)
                self._first = target
                return result
            except grpc.aio.AioRpcError as error:
                failure = _aio_failure(error)
            except asyncio.CancelledError as error:
                failure = await self._cancelled_by_server(call, error)
            finally:
                call.cancel()
            await asyncio.sleep(going.pause_s(failure, clock()))
            target = (target + 1) % len(self._stubs)

    async def _cancelled_by_server(self, call: Any, error: asyncio.CancelledError) -> PacelineError:
        """grpc also raises CancelledError when the server has cancelled the call. If the client has cancelled it, this
        method raises the error again."""
        task = asyncio.current_task()
        if self._closed or not call.done() or (task is not None and task.cancelling()):
            raise error
        return error_from(grpc.StatusCode.CANCELLED, await call.details(), None)

    async def close(self) -> None:
        """Close the connections, and cancel running requests."""
        self._closed = True
        for channel in self._channels:
            await channel.close(None)

    async def __aenter__(self) -> AsyncPacelineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
