"""A scheduler that is not the leader. A standby refuses calls until it leads. A former leader ends its process."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from scheduler_svc.cache_secret import new_secret
from scheduler_svc.settings import SchedulerSettings
from services.runtime.logs import get_logger
from services.runtime.tls.opening import open_tls

if TYPE_CHECKING:
    from scheduler_svc.election import Election

    # Generic in the stubs only.
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

log = get_logger(__name__)

# Another scheduler may lead. The supervisor should start this one again, as a standby: EX_TEMPFAIL of sysexits.h.
LOST_STATUS = 75
EVERY_ADDRESS = {"0.0.0.0", "::"}


def open_election(settings: SchedulerSettings) -> Election:
    """The election for a scheduler of these settings, which name an etcd."""
    # Imported only here: most schedulers run alone, and the HTTP client takes long to import.
    from scheduler_svc.election import Election
    from scheduler_svc.etcd import Etcd

    host = socket.gethostname() if settings.host in EVERY_ADDRESS else settings.host
    tls = open_tls(settings.etcd_tls_dir or settings.tls_dir, settings.section) if "https://" in settings.etcd else None
    # The timeout is short, so that there is time to ask the next endpoint if one does not answer.
    etcd = Etcd(settings.etcd.split(","), settings.etcd_key, timeout_s=settings.etcd_ttl_s / 4, tls=tls)
    offered_secret = b"" if settings.cache_secret_file else new_secret()
    return Election(etcd, f"{host}:{settings.port}", settings.etcd_ttl_s, offered_secret=offered_secret)


class StandbyGate(_Interceptor):
    """Refuses every call before the election is won, except health and reflection."""

    def __init__(self, election: Election) -> None:
        self._election = election

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or self._election.epoch or handler_call_details.method.startswith("/grpc."):
            return handler
        why = f"standby; the leader is {self._election.leader or 'not elected yet'}"

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)

        make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(refuse, handler.request_deserializer, handler.response_serializer)


def step_down(reason: str) -> NoReturn:
    """End at once, without sending anything more: another scheduler may lead by now."""
    log.error("not the leader any more, ending", reason=reason)
    os._exit(LOST_STATUS)
