"""InferenceService.Generate made pleasant, blocking and asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import grpc.aio

from paceline.v1 import inference_pb2_grpc
from services.client.types import Messages, Options, Piece, Result, error_from, make_request, piece_from, result_from

_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    # What grpc core takes for a ping's timeout.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
]


class PacelineClient:
    """A blocking client of a gateway's gRPC port. Threads may share it.

    >>> with PacelineClient("127.0.0.1:8001") as client:                                        # doctest: +SKIP
    ...     print(client.generate("Once there was a fox", max_tokens=20, temperature=0).text)
    ...     for piece in client.stream(messages=[{"role": "user", "content": "Hi!"}]):
    ...         print(piece.text, end="", flush=True)

    Every method raises a subclass of PacelineError if the request fails, TypeError if the arguments make no request.
    `timeout_s` is a deadline for the whole answer.
    """

    def __init__(self, target: str = "127.0.0.1:8001", *, model: str = "") -> None:
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._model = model

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
        """The answer as it comes. Closing the iterator cancels the request."""
        request = make_request(prompt, messages, token_ids, self._model, options)
        call: Any = self._stub.Generate(request, timeout=timeout_s)
        try:
            for response in call:
                yield piece_from(response)
        except grpc.RpcError as error:
            raise error_from(call.code(), call.details(), call.trailing_metadata()) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the connection; what still runs is cancelled."""
        self._channel.close()

    def __enter__(self) -> PacelineClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncPacelineClient:
    """The same for asyncio.

    >>> async with AsyncPacelineClient("127.0.0.1:8001") as client:                             # doctest: +SKIP
    ...     result = await client.generate(messages=[{"role": "user", "content": "Hi!"}], seed=7)
    ...     async for piece in client.stream("Once there was a fox", stop=["."]):
    ...         print(piece.text, end="", flush=True)
    """

    def __init__(self, target: str = "127.0.0.1:8001", *, model: str = "") -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._model = model

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
        """The answer as it comes. Closing the iterator cancels the request."""
        request = make_request(prompt, messages, token_ids, self._model, options)
        call: Any = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield piece_from(response)
        except grpc.aio.AioRpcError as error:
            raise error_from(await call.code(), error.details(), await call.trailing_metadata()) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connection; what still runs is cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncPacelineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
