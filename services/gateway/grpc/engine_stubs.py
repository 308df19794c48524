"""Calls of the engine contracts that no Paceline gateway serves. All contracts define them alike."""

from __future__ import annotations

import grpc.aio

from paceline.third_party import smg_common_pb2 as smg
from services.gateway.grpc.status import unimplemented

_Context = grpc.aio.ServicerContext[object, object]


class EngineStubs:
    """Each call ends with UNIMPLEMENTED. The message says why, or what to use instead."""

    async def FlushCache(self, request: smg.FlushCacheRequest, context: _Context) -> smg.FlushCacheResponse:
        """Not served."""
        await unimplemented(context, "FlushCache: use `paceline cache reset`")

    async def StartProfile(self, request: smg.StartProfileRequest, context: _Context) -> smg.ProfileResponse:
        """Not served."""
        await unimplemented(context, "StartProfile: workers have no profiler")

    async def StopProfile(self, request: smg.StopProfileRequest, context: _Context) -> smg.ProfileResponse:
        """Not served."""
        await unimplemented(context, "StopProfile: workers have no profiler")
