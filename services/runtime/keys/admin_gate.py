"""Lets admin calls through only with an admin key; without keys, only from this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from services.runtime.keys.keyring import NoCredential, shown_secret
from services.runtime.keys.listen import is_local_peer
from services.runtime.keys.source import KeySource
from services.runtime.logs import get_logger
from services.runtime.rpc import HANDLED, STARTED, make_unread_handler

_log = get_logger(__name__)

if TYPE_CHECKING:  # generic in the stubs only
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

_Refusal = tuple[grpc.StatusCode, str]


class AdminGate(_Interceptor):
    """Guards methods, as one of the interceptors that come first: it refuses a call before the request is received.

    `admin`: names of methods (`/paceline.v1.X/Method`), or of services with a slash at the end. `keyed`: methods that
    need an admin key when there are keys, and are open otherwise.
    """

    def __init__(
        self, keys: KeySource | None, *, admin: Collection[str], keyed: Collection[str] = (), insecure: bool = False
    ) -> None:
        self._keys, self._insecure = keys, insecure
        self._guarded = tuple(admin) if keys is None else (*admin, *keyed)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._guarded):
            return handler
        return make_unread_handler(handler, self._guard(handler, handler_call_details.method))

    def check(self, peer: str, metadata: Iterable[tuple[str, str | bytes]]) -> str | _Refusal:
        """The name of the key of a guarded call ("" without keys), or why the call is refused."""
        if self._keys is None:
            if self._insecure or is_local_peer(peer):
                return ""
            message = "without API keys, admin calls are served to this machine only; give keys (--keys-file)"
            return grpc.StatusCode.PERMISSION_DENIED, message
        try:
            key = self._keys.current.find(shown_secret(metadata))
        except NoCredential as error:
            return grpc.StatusCode.UNAUTHENTICATED, f"{error}; this call needs an admin key"
        if key is None:
            return grpc.StatusCode.UNAUTHENTICATED, "the API key is not known here"
        if not key.admin:
            return grpc.StatusCode.PERMISSION_DENIED, f"the key {key.name!r} may not use admin calls (admin = true)"
        return key.name

    def _guard(self, handler: grpc.RpcMethodHandler[Any, Any], method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def call(request: Any, context: Any) -> Any:
            checked = self.check(context.peer(), context.invocation_metadata() or ())
            if not isinstance(checked, str):
                STARTED.labels(method).inc()
                HANDLED.labels(method, checked[0].name).inc()
                await context.abort(*checked)
            elif checked:
                _log.info("admin call", method=method.rpartition("/")[2], key=checked, peer=context.peer())
            if not handler.request_streaming and not isinstance(request := await context.read(), bytes):  # EOF
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
            answer = behaviour(request, context)
            del request
            if not isinstance(answer, AsyncGenerator):
                return await answer
            async with aclosing(answer):
                async for message in answer:
                    await context.write(message)
            return None

        return call
