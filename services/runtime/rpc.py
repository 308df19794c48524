"""Makes gRPC servers and channels with the same settings, encrypted where the service has certificates.

Two settings are surprising. grpc core ignores `keepalive_timeout_ms` (grpc/grpc#39239): the timeout of a ping is
`http2.ping_timeout_ms`, and without it a frozen peer is noticed only after a minute. And with the default HTTP/2 window
a server can run megabytes ahead of a reader. `lookahead_bytes` keeps that small (protocols that must not run ahead at
all have credits).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter, Histogram

from services.runtime.grpc_limits.message_gate import MessageGate
from services.runtime.grpc_limits.open_streams import OpenStreams, TooManyStreams
from services.runtime.logs import bind_request_id, get_logger
from services.runtime.reflection.both_names import add_reflection
from services.runtime.tls.credentials import channel_credentials, server_credentials
from services.runtime.tls.exposed import warn_without_tls
from services.runtime.tls.files import TlsFiles
from services.runtime.tracing.context import TRACEPARENT, TRACESTATE, bind_context, parse_context

log = get_logger(__name__)

MAX_MESSAGE_BYTES = 16 * 2**20
PING_INTERVAL_S = 2.0
PING_TIMEOUT_S = 2.0

STARTED = Counter("grpc_server_started", "gRPC calls that began", ["grpc_method"])
HANDLED = Counter("grpc_server_handled", "gRPC calls that ended", ["grpc_method", "grpc_code"])
# From a call that is answered from memory to a generation of half an hour.
_HANDLING_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
HANDLING_SECONDS = Histogram(
    "grpc_server_handling_seconds", "How long gRPC calls took", ["grpc_method"], buckets=_HANDLING_BUCKETS_S
)

if TYPE_CHECKING:  # generic only in the stubs
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

# By whether requests and responses are streams.
_MAKE_HANDLER: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
Options = list[tuple[str, int]]


def transport_options(
    ping_interval_s: float = PING_INTERVAL_S,
    ping_timeout_s: float = PING_TIMEOUT_S,
    *,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
    lookahead_bytes: int = 256 * 1024,
) -> Options:
    """Channel arguments for either end of a connection. A peer that does not answer pings is given up.

    `max_receive_bytes`: limit of one message. `lookahead_bytes`: how much the other end may send of an unread message.
    """
    interval_ms = int(ping_interval_s * 1000)
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", int(ping_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(ping_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", interval_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.lookahead_bytes", lookahead_bytes),
        ("grpc.http2.bdp_probe", 0),
    ]


def link_options(ping_timeout_s: float) -> Options:
    """transport_options() for the links between services. A frozen peer is given up after the timeout plus at most a
    quarter of it."""
    return transport_options(ping_timeout_s / 4, ping_timeout_s)


def open_channel(
    target: str,
    options: Options | None = None,
    tls: TlsFiles | None = None,
    *,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """A channel to host:port that reconnects quickly and notices a dead peer. Use one per peer and process.

    `tls`: the channel shows these certificates and trusts their CAs. It does not notice when they are renewed, so open
    a new channel for each attempt to connect. `credentials`: instead of `tls`. Without either, the channel is not
    encrypted.
    """
    reconnect = [
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name: how long an attempt to connect may take. A busy peer needs more than the back-off.
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Services are dialled by address. A proxy in the environment is for the internet.
        ("grpc.enable_http_proxy", 0),
    ]
    all_options = [*(options or transport_options()), *reconnect]
    if tls is not None:
        credentials = channel_credentials(tls)
    if credentials is not None:
        return grpc.aio.secure_channel(target, credentials, options=all_options)
    return grpc.aio.insecure_channel(target, options=all_options)


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 for the server ("") and its services. All are serving or none is (except on a standby).

    Unlike the library's servicer, it ends its watches when the server stops. `Server.stop` waits for every open call,
    and a watch would delay it for the whole grace period.
    """

    def __init__(self) -> None:
        self.names = {""}
        self._serving = self._services_serving = False
        self._closing = False
        self._changed = asyncio.Event()

    def set(self, serving: bool, *, standby: bool = False, closing: bool = False) -> None:
        """Tell the watchers; with `closing` for the last time. `standby`: the server is healthy, but its services are
        not available yet."""
        self._serving, self._services_serving, self._closing = serving, serving and not standby, closing
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Whether a service is serving. NOT_FOUND for an unknown name."""
        if request.service not in self.names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return self._status(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and after each change."""
        last = None
        while True:
            changed, closing = self._changed, self._closing
            if (status := self._status(request.service)) != last:
                yield status
                last = status
            if closing:
                return
            await changed.wait()

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        """The status of every service."""
        return health_pb2.HealthListResponse(statuses={name: self._status(name) for name in self.names})

    def _status(self, name: str) -> health_pb2.HealthCheckResponse:
        answer = health_pb2.HealthCheckResponse
        if name not in self.names:
            return answer(status=answer.SERVICE_UNKNOWN)
        serving = self._services_serving if name else self._serving
        return answer(status=answer.SERVING if serving else answer.NOT_SERVING)


class GrpcServer:
    """A grpc.aio server with health (`grpc.health.v1`, for "" and every service) and reflection."""

    def __init__(
        self,
        host: str,
        port: int,
        options: Options | None = None,
        interceptors: Sequence[_Interceptor] = (),
        gate: MessageGate | None = None,
        first: Sequence[_Interceptor] = (),
        tls: TlsFiles | None = None,
    ) -> None:
        """`gate`: limits what methods with a single request receive at once (health's methods are exempt). `first`:
        interceptors that see a call before its request is received. `tls`: shows these certificates, and demands a
        client certificate if they name CAs."""
        self._host, self._port, self._tls = host, port, tls
        server_options = [*(options or transport_options()), ("grpc.so_reuseport", 0)]
        all_interceptors = [*first, CallInterceptor(gate), *interceptors]
        self._server = grpc.aio.server(options=server_options, interceptors=all_interceptors)
        self._health = Health()

    def add(self, full_service_name: str, register: Callable[[grpc.aio.Server], None]) -> None:
        """Add a servicer: `add("paceline.v1.CacheService", lambda s: add_CacheServiceServicer_to_server(x, s))`."""
        register(self._server)
        self._health.names.add(full_service_name)

    async def start(self) -> int:
        """Listen, and return the port. Health says NOT_SERVING until `set_serving`. Raises RuntimeError if the port is
        in use."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection(self._server, (*sorted(self._health.names - {""}), "grpc.health.v1.Health"))
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self._port}"
        if self._tls is not None:
            port = self._server.add_secure_port(address, server_credentials(self._tls))
        else:
            port = self._server.add_insecure_port(address)
            warn_without_tls(self._host, "grpc", address)
        await self._server.start()
        return port

    def set_serving(self, serving: bool, *, standby: bool = False) -> None:
        """Set the answer of the health service: see Health.set()."""
        self._health.set(serving, standby=standby)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING first. Running calls get `grace_s` to end, and are cancelled then."""
        self._health.set(False, closing=True)
        await self._server.stop(grace_s)


class CallInterceptor(_Interceptor):
    """Counts and times calls, binds `x-request-id` and the client's trace to the log, and maps invalid messages to
    INVALID_ARGUMENT and unexpected exceptions to INTERNAL."""

    def __init__(self, gate: MessageGate | None = None) -> None:
        self._gate = gate
        self._streams = OpenStreams()  # of methods that everyone may call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        request_id = metadata.get("x-request-id")
        if isinstance(request_id, str) and request_id:
            bind_request_id(request_id[:128])
        bind_context(parse_context(metadata.get(TRACEPARENT, ""), metadata.get(TRACESTATE, "")))
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if method.startswith("/grpc.") and handler.response_streaming:
            behaviour = _limited(behaviour, self._streams)
        streaming, decode, gate = handler.request_streaming, handler.request_deserializer, None
        if streaming:
            watched = _watched(behaviour, method)
        else:  # for an invalid request grpc would report UNKNOWN, as if the server had failed
            if not method.startswith("/grpc."):
                gate = self._gate
            watched, decode = _watched(behaviour, method, decode, gate), None
        # For a method with a client stream, gRPC reads a message only when the handler asks for one.
        make = _MAKE_HANDLER[streaming or gate is not None, handler.response_streaming]
        return make(watched, decode, handler.response_serializer)


def _limited(behaviour: Any, streams: OpenStreams) -> Any:
    """The same behaviour, but it aborts a call with RESOURCE_EXHAUSTED if too many streams are open already."""

    async def call(request: Any, context: Any) -> AsyncGenerator[Any]:
        try:
            with streams.hold(context.peer()):
                async with aclosing(behaviour(request, context)) as answers:
                    async for answer in answers:
                        yield answer
        except TooManyStreams as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    return call


def make_unread_handler(handler: grpc.RpcMethodHandler[Any, Any], behaviour: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler with another behaviour for the same method. For gRPC it takes a stream, so gRPC reads no message before
    the behaviour does. The behaviour reads a single request by `context.read()`."""
    make = _MAKE_HANDLER[True, handler.response_streaming]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _code_name(code: grpc.StatusCode | int | None) -> str:
    """The name of a context's status, which is a number if the handler set none, else a StatusCode."""
    return code.name if isinstance(code, grpc.StatusCode) else CODE_NAMES.get(code or 0, "UNKNOWN")


def _watched(
    behaviour: Any, method: str, decode: Callable[[bytes], Any] | None = None, gate: MessageGate | None = None
) -> Any:
    """The same behaviour, with metrics, and with errors as status codes. `decode`: decodes the bytes of a single
    request; None for a stream: gRPC decodes its messages. `gate`: reads the single request, if gRPC does not."""

    async def call(request: Any, context: Any) -> Any:
        began = time.perf_counter()
        STARTED.labels(method).inc()
        cancelled = False
        try:
            if gate is not None:
                request = await gate.read(context)
            answer = behaviour(decode(request) if decode is not None else request, context)
            del request  # the behaviour decides how long a large request lives
            if isinstance(answer, AsyncGenerator):
                async with aclosing(answer):
                    async for message in answer:
                        await context.write(message)
                return None
            return await answer
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            cancelled = True
            raise
        except DecodeError as error:
            log.warning("cannot decode a message", method=method, error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a message cannot be decoded: {error}")
        except Exception as error:
            # A handler blocked in a write to a gone client gets a cython error instead of a cancellation.
            if type(error).__name__ == "ExecuteBatchError" or context.cancelled():
                cancelled = True
                raise
            log.exception("call failed", method=method)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")
        finally:
            HANDLING_SECONDS.labels(method).observe(time.perf_counter() - began)
            HANDLED.labels(method, "CANCELLED" if cancelled else _code_name(context.code())).inc()

    return call
