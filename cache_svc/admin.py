"""CacheAdminService: pins, a reset, fill levels. A call runs between two exchanges."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import grpc

from cache_svc.core import admin
from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import OpError
from cache_svc.core.sequences.pins import Pin
from cache_svc.core.tree.nodes import Namespace
from paceline.v1 import cache_pb2 as pb
from paceline.v1 import cache_pb2_grpc
from services.runtime.logs import get_logger

ADMIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheAdminService"].full_name
STATUS = {code.value[0]: code for code in grpc.StatusCode}

log = get_logger("cache_svc.admin")

Context = grpc.aio.ServicerContext[Any, Any]


def now_ms() -> int:
    """The clock of pin expiry."""
    return time.monotonic_ns() // 1_000_000


class CacheAdmin(cache_pb2_grpc.CacheAdminServiceServicer):
    """See cache.proto."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:
        now, names = now_ms(), request.namespace
        admin.expire_pins(self._core, now)
        try:
            pin = admin.pin(
                self._core,
                request.name,
                request.token_ids,
                Namespace(names.model, names.lora, names.cache_salt),
                request.workers[:],
                request.ttl_s * 1000,
                now,
            )
        except OpError as refused:
            await _refuse(context, refused)
        message = _message(pin, now)
        tokens = {place.worker: place.num_tokens for place in message.workers}
        log.info("prefix pinned", name=pin.name, tokens_by_worker=tokens, ttl_s=request.ttl_s)
        return pb.PinPrefixResponse(pin=message)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Context) -> pb.UnpinPrefixResponse:
        admin.expire_pins(self._core, now_ms())
        try:
            admin.unpin(self._core, request.name)
        except OpError as refused:
            await _refuse(context, refused)
        log.info("prefix unpinned", name=request.name)
        return pb.UnpinPrefixResponse()

    async def ListPins(self, request: pb.ListPinsRequest, context: Context) -> pb.ListPinsResponse:
        now = now_ms()
        admin.expire_pins(self._core, now)
        return pb.ListPinsResponse(pins=[_message(pin, now) for pin in self._core.pins.by_name.values()])

    async def ResetCache(self, request: pb.ResetCacheRequest, context: Context) -> pb.ResetCacheResponse:
        names = {field.name: value for field, value in request.ListFields()}
        forgotten = admin.forget_unused(self._core, **names)
        log.info("cache reset", blocks_by_worker=forgotten, namespaces={**names, "cache_salt": "cache_salt" in names})
        return pb.ResetCacheResponse(
            workers=[pb.ForgottenBlocks(worker=worker, num_blocks=count) for worker, count in forgotten.items()]
        )

    async def GetCacheStats(self, request: pb.GetCacheStatsRequest, context: Context) -> pb.GetCacheStatsResponse:
        core = self._core
        admin.expire_pins(core, now_ms())
        tree, counters = core.tree, core.counters
        return pb.GetCacheStatsResponse(
            block_size=tree.block_size if tree is not None else 0,
            num_namespaces=len(tree.roots) if tree is not None else 0,
            workers=[
                pb.WorkerStats(
                    pool=pool,
                    pinned_blocks=core.pins.num_blocks(core.workers[pool.worker]),
                    max_pinned_blocks=core.pins.max_blocks(core.workers[pool.worker]),
                )
                for pool in core.present_counters()
            ],
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            num_event_watchers=len(core.events.watchers),
        )


def _message(pin: Pin, now: int) -> pb.Pin:
    return pb.Pin(
        name=pin.name,
        namespace=pb.CacheNamespace(model=pin.namespace.model, lora=pin.namespace.lora),
        workers=[
            pb.PinnedPrefix(worker=worker.worker_id, num_tokens=num_tokens)
            for worker, num_tokens in admin.pinned_tokens(pin)
        ],
        expires_in_s=(pin.expires_ms - now) / 1000 if pin.expires_ms else 0.0,
    )


async def _refuse(context: Context, refused: OpError) -> NoReturn:
    await context.abort(STATUS[refused.code], refused.message)
    raise AssertionError("abort never returns")
