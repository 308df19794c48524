"""Refuses gRPC calls without a valid key before their request is received."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from services.gateway.access.control import AccessControl
from services.gateway.errors import ApiError
from services.runtime.rpc import HANDLED, STARTED

if TYPE_CHECKING:  # generic in the stubs only
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class KeyGate(_Interceptor):
    """The first interceptor of the gateway. Health and reflection need no key."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        if not method.startswith("/grpc."):
            try:
                self._access.identify(handler_call_details.invocation_metadata or ())
            except ApiError as error:
                return _refusing(error, method)
        return await continuation(handler_call_details)


def _refusing(error: ApiError, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: Any) -> None:
        STARTED.labels(_known(method)).inc()
        HANDLED.labels(_known(method), error.grpc_code.name).inc()
        await context.abort(error.grpc_code, error.message)

    # For a method with a client stream, gRPC reads a message only when the handler asks for one. So the request of a
    # refused call takes no memory.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _known(method: str) -> str:
    """A label for metrics. Clients without a key must not be able to add labels."""
    return method if method == "/paceline.v1.InferenceService/Generate" else "refused"
