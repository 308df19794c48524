"""The gateway as a service: HTTP front, gRPC front and the session to the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.v1 import common_pb2, inference_pb2_grpc
from services.gateway.grpc_front import SERVICE_NAME, InferenceFront
from services.gateway.http import create_app
from services.gateway.http_server import HttpServer
from services.gateway.id_tokenizer import IdTokenizer
from services.gateway.metrics import GatewayMetrics
from services.gateway.model_files import read_model_files, resolve_folder
from services.gateway.request import RequestBuilder
from services.gateway.request_store import RequestStore
from services.gateway.session import SchedulerSession
from services.gateway.settings import GatewaySettings
from services.gateway.state import Gateway
from services.gateway.tokenizer import TextTokenizer
from services.runtime.hub import NoSuchModel
from services.runtime.logs import get_logger
from services.runtime.rpc import GrpcServer
from services.runtime.service import Addresses, CannotStart, interruptible

_log = get_logger(__name__)

_DRAIN_POLL_S = 0.05
_TICK_S = 0.2


async def serve(
    settings: GatewaySettings, stop: asyncio.Event, *, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Run until `stop` is set, then drain.

    Serves /health at once, with or without a scheduler. Raises OSError for a port that is taken, CannotStart for a
    model whose files cannot be read.
    """
    session = SchedulerSession(
        settings.scheduler, max_live=settings.max_live_requests, wait_s=settings.scheduler_wait_s
    )
    with interruptible():
        gateway = await asyncio.to_thread(_load, settings, session)
    http_server = HttpServer(
        create_app(gateway),
        settings.host,
        settings.port,
        max_connections=settings.max_connections,
        head_timeout_s=settings.head_timeout_s,
    )
    http_port = await http_server.start()
    grpc_server = GrpcServer(settings.host, settings.grpc_port)
    front = InferenceFront(gateway)
    grpc_server.add(SERVICE_NAME, lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(front, s))
    # grpc.health.v1 says SERVING exactly while /ready says 200.
    session.on_status = lambda: grpc_server.set_serving(gateway.ready)
    ticking = asyncio.create_task(_tick(gateway.requests))
    try:
        grpc_port = await grpc_server.start()
        session.start()
        http = f"{settings.host}:{http_port}"
        _log.info("gateway serves", http=http, grpc_port=grpc_port, model=gateway.model_name)
        if on_ready is not None:
            on_ready(Addresses(grpc=f"{settings.host}:{grpc_port}", http=http, metrics=http))
        await stop.wait()
        gateway.draining = True
        grpc_server.set_serving(False)
        gateway.requests.drain()
        await _drain(gateway, settings.drain_s)
    finally:
        ticking.cancel()
        await session.close()
        await grpc_server.stop(0.5)
        await http_server.stop()


def _load(settings: GatewaySettings, session: SchedulerSession) -> Gateway:
    try:
        folder = resolve_folder(settings.model)
        files = read_model_files(folder)
        tokenizer: TextTokenizer | IdTokenizer
        if (folder / "tokenizer.json").is_file():
            tokenizer = TextTokenizer.from_folder(folder, settings.chat_template)
        else:
            _log.warning("no tokenizer.json: only token ids are served, and output reads as ids", model=str(folder))
            tokenizer = IdTokenizer(files.vocab_size)
    except (NoSuchModel, FileNotFoundError, ValueError) as error:
        raise CannotStart(str(error)) from error
    builder = RequestBuilder(
        tokenizer, files, worker_model=lambda: _worker_model(session), max_model_len=settings.max_model_len
    )
    requests = RequestStore(
        grace_s=settings.resume_grace_s, keep_s=settings.resume_keep_s, max_bytes=settings.resume_keep_bytes
    )
    return Gateway(
        settings.model_name, builder, session, GatewayMetrics(), requests, max_body_bytes=settings.max_body_bytes
    )


def _worker_model(session: SchedulerSession) -> common_pb2.ModelInfo | None:
    status = session.status
    return status.model if status is not None and status.HasField("model") else None


async def _tick(requests: RequestStore) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        requests.tick()


async def _drain(gateway: Gateway, drain_s: float) -> None:
    """New requests are refused by now; wait for the others."""
    metrics = gateway.metrics
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + drain_s
    if metrics.live_requests:
        _log.info("draining", live=metrics.live_requests, drain_s=drain_s)
    while metrics.live_requests and loop.time() < deadline_s:  # noqa: ASYNC110 - polled once in a gateway's life
        await asyncio.sleep(_DRAIN_POLL_S)
    if metrics.live_requests:
        _log.warning("drain time is over; the rest fails", live=metrics.live_requests)
