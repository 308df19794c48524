"""SubscribeKvEvents: reads the cache's WatchEvents for each subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio

from paceline.third_party import smg_common_pb2 as smg
from paceline.v1 import cache_pb2, cache_pb2_grpc
from services.gateway.grpc.kv_events import KvEventTranslator, NoTokens
from services.gateway.grpc.status import unimplemented
from services.runtime.rpc import open_channel
from services.runtime.tls.files import TlsFiles

# The cache serves 64 watchers, from all gateways.
MAX_SUBSCRIBERS = 16
_OFF = "SubscribeKvEvents is off: start the gateway with --cache HOST:PORT"
_CREDENTIALS = ("authorization", "x-api-key")


class KvEventStreams:
    """The subscribers of one gateway. `cache`: host:port of the cache; empty: the method is UNIMPLEMENTED. `tls`: the
    certificates for the connection to the cache."""

    def __init__(self, cache: str, tls: TlsFiles | None = None) -> None:
        self._target, self._tls = cache, tls
        self._calls: set[Any] = set()
        self._closing = False

    async def subscribe(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[smg.KvEventBatch]:
        """A snapshot, then every event. A subscriber that comes back gets a snapshot, too: what it has missed is not
        kept here.

        The subscriber's API key is passed on, and the cache decides about it, too. Ends with UNIMPLEMENTED if the
        cache sends no tokens, so that a router does not come back for them.
        """
        if not self._target:
            await unimplemented(context, _OFF)
        if self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")
        if len(self._calls) >= MAX_SUBSCRIBERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {MAX_SUBSCRIBERS} subscribers, which is the limit"
            )
        translator = KvEventTranslator()
        key = [(name, value) for name, value in context.invocation_metadata() or () if name in _CREDENTIALS]
        async with open_channel(self._target, tls=self._tls) as channel:  # a new channel has the newest certificates
            call = cache_pb2_grpc.CacheServiceStub(channel).WatchEvents(cache_pb2.WatchEventsRequest(), metadata=key)
            self._calls.add(call)
            try:
                await context.send_initial_metadata(())
                async for response in call:
                    for batch in translator.take(response):
                        yield batch
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the cache has ended the stream")
            except NoTokens as error:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
            except asyncio.CancelledError:
                if not self._closing or context.cancelled():
                    raise
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), f"the cache: {error.details()}")
            finally:
                call.cancel()
                self._calls.discard(call)

    def close(self) -> None:
        """End all streams. A drain would otherwise wait for them."""
        self._closing = True
        for call in self._calls:
            call.cancel()
