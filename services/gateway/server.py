"""The gateway as a service: the HTTP API, the gRPC API and the session with the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from paceline.third_party.kserve_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from paceline.third_party.sglang_scheduler_pb2_grpc import add_SglangSchedulerServicer_to_server
from paceline.third_party.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server
from paceline.v1 import inference_pb2_grpc
from services.gateway.access.control import AccessControl
from services.gateway.anthropic.routes import anthropic_api
from services.gateway.batches.calls import endpoints_of
from services.gateway.batches.files import FileLimits
from services.gateway.batches.routes import batches_api, files_api
from services.gateway.batches.service import Batches
from services.gateway.embeddings.routes import embeddings_api
from services.gateway.engine.request import RequestBuilder
from services.gateway.engine.request_store import RequestStore
from services.gateway.engine.session import SchedulerSession
from services.gateway.grpc import kserve, sglang_scheduler, vllm_engine
from services.gateway.grpc.engine import Engine
from services.gateway.grpc.engine_facts import TokenizerArchive, read_facts
from services.gateway.grpc.inference_service import SERVICE_NAME, InferenceService
from services.gateway.grpc.key_gate import KeyGate
from services.gateway.grpc.kserve import KServeInference
from services.gateway.grpc.kv_event_streams import KvEventStreams
from services.gateway.grpc.sglang_scheduler import SglangScheduler
from services.gateway.grpc.vllm_engine import VllmEngine
from services.gateway.http.body import MOST_BODY_BYTES, Bodies, default_max_body_bytes
from services.gateway.http.handshake import ServerTls
from services.gateway.http.hosts import AllowedHosts
from services.gateway.http.origins import AllowedOrigins
from services.gateway.http.server import HttpServer
from services.gateway.live_view.cache_watch import CacheWatch
from services.gateway.live_view.feed import LiveFeed
from services.gateway.live_view.routes import live_api
from services.gateway.live_view.traces import LiveTraces
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import OtherApi
from services.gateway.openai.routes import create_app, generation_routes
from services.gateway.page.routes import page_api
from services.gateway.parsing.formats import ModelFormats, model_formats
from services.gateway.responses_api.routes import responses_api
from services.gateway.responses_api.service import Responses
from services.gateway.settings import GatewaySettings
from services.gateway.store.opening import Stores, open_stores
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.request_log import RequestLog
from services.gateway.telemetry.tenant_metrics import TenantMetrics
from services.gateway.telemetry.vllm_metrics import VllmMetrics
from services.gateway.text.chat_template import read_tokenizer_info
from services.gateway.text.id_tokenizer import IdTokenizer
from services.gateway.text.model_files import ModelFiles, asked_end, read_model_files, resolve_folder
from services.gateway.text.own_model import OwnModel
from services.gateway.text.tokenizer import TextTokenizer
from services.runtime.grpc_limits.client_connections import ClientConnections
from services.runtime.grpc_limits.message_gate import MessageGate
from services.runtime.keys.admin_gate import AdminGate
from services.runtime.keys.listen import safe_host
from services.runtime.keys.source import KeySource, open_keys
from services.runtime.logs import get_logger
from services.runtime.model.hub import NoSuchModel
from services.runtime.model.identity import read_identity
from services.runtime.rpc import GrpcServer, transport_options
from services.runtime.service import Addresses, CannotStart, interruptible, max_open_files, trim_memory
from services.runtime.tls.files import TlsFiles
from services.runtime.tls.opening import open_files, open_tls
from services.runtime.tracing.settings import open_spans

_log = get_logger(__name__)

_DRAIN_POLL_S = 0.05
# During a drain, idle connections stay open this long, so that a client that is just sending a request can do so.
_IDLE_CONNECTIONS_S = 1.0
# After the drain time, requests get this long to fail with an error.
_LAST_WORDS_S = 0.5
_TICK_S = 0.2
_WATCH_S = 0.02
# Free memory goes back to the system when this many bytes of bodies and messages were freed since the last time, and
# nothing was freed for a second.
_TRIMMED_BYTES, _TRIM_S = 16 * 2**20, 1.0
KV_EVENT_METHODS = tuple(
    f"/{service}/SubscribeKvEvents" for service in (vllm_engine.SERVICE_NAME, sglang_scheduler.SERVICE_NAME)
)
# A gRPC message takes about this many times its size while it is received: as slices, as bytes, as a message.
_COPIES = 4
# The headers of an answer that a page's script may read (CORS): request ids, Server-Timing, and the headers that tell
# the official clients when to retry.
EXPOSED_HEADERS = ("x-request-id", "request-id", "server-timing", "retry-after", "retry-after-ms", "x-should-retry")
_MAX_READING = 64  # gRPC messages that are read at once
# How much of a message a gRPC client may send before the gate reads it.
_LOOKAHEAD_BYTES = 16 * 1024
# A connection is closed after _HANDSHAKE_S without a handshake (TLS or gRPC), and a gRPC connection after _IDLE_CALLS_S
# without a call.
_HANDSHAKE_S, _IDLE_CALLS_S = 10.0, 300.0
# The minimum of the default limit per gRPC client, for tests and small machines.
_LEAST_PER_GRPC_CLIENT = 16


async def serve(
    settings: GatewaySettings, stop: asyncio.Event, *, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Run until `stop` is set, then drain.

    Serves /health as soon as the model's files are read, with or without a scheduler. Raises OSError if the HTTP port
    is in use, RuntimeError if the gRPC port is in use or a background task fails, CannotStart if the model's files, the
    keys or the certificates cannot be read.
    """
    keys = open_keys(settings.keys_file)
    host, why = safe_host(settings.host, has_keys=keys is not None, insecure=settings.insecure)
    if why:
        _log.warning(why)
        settings = settings.model_copy(update={"host": host})
    with interruptible():
        model = await asyncio.to_thread(_read_model, settings)
    internal = open_tls(settings.tls_dir, settings.section)
    public = open_files(paths) if (paths := settings.public_tls) is not None else None
    session = _make_session(settings, model, internal)
    gateway = _make_gateway(settings, model, session, keys)
    stores = _open_stores(settings)
    responses = Responses(gateway, stores.responses if stores is not None else None, grace_s=settings.resume_grace_s)
    apis = [responses_api(responses), anthropic_api(gateway), embeddings_api(gateway)]
    batches = _make_batches(settings, gateway, stores, apis)
    live_feed = LiveFeed(gateway, CacheWatch(settings.cache, internal))
    live_traces = LiveTraces(gateway)
    apis += [files_api(batches), batches_api(batches), *live_api(gateway, live_feed, live_traces), page_api()]
    http_server = _make_http_server(settings, gateway, apis, public)
    http_port = await http_server.start()
    kv_events = KvEventStreams(settings.cache, internal)
    engine = _make_engine(settings, gateway, model.files, kv_events)
    grpc_server = _make_grpc_server(settings, gateway, engine, keys, public)
    # grpc.health.v1 says SERVING exactly while /ready says 200.
    session.on_status = lambda: grpc_server.set_serving(gateway.ready)
    periodic = _start_periodic_work(gateway, responses, batches, http_server, keys)
    try:
        grpc_port = await grpc_server.start()
        periodic.append(_limit_grpc_clients(settings, grpc_port))
        background = [*periodic, *session.start()]
        http = f"{settings.host}:{http_port}"
        _log.info("gateway serves", http=http, grpc_port=grpc_port, model=gateway.model_name, tls=public is not None)
        if on_ready is not None:
            on_ready(Addresses(grpc=f"{settings.host}:{grpc_port}", http=http, metrics=http))

        async def until_drained() -> None:
            await stop.wait()
            gateway.draining = True
            gateway.requests.drain()
            kv_events.close()
            live_feed.close()
            live_traces.close()
            await http_server.close_listener()
            drain = _drain(gateway, http_server, grpc_server, settings.drain_s)
            await asyncio.gather(batches.close(), drain)

        await _beside(background, until_drained())
    finally:
        for task in periodic:
            task.cancel()
        gateway.parser.close()
        await batches.close()  # for a gateway that has not drained
        await responses.close()
        await session.close()
        kv_events.close()
        await grpc_server.stop(_LAST_WORDS_S)
        await http_server.stop()
        if stores is not None:
            await stores.close()
        await gateway.builder.close()
        if gateway.spans is not None:
            await asyncio.to_thread(gateway.spans.close)


def _max_grpc_connections(settings: GatewaySettings) -> int:
    """The limit of gRPC connections. It leaves most of the process's file descriptors to HTTP."""
    open_files = max_open_files()
    return settings.max_grpc_connections if open_files is None else min(settings.max_grpc_connections, open_files // 4)


def _limit_grpc_clients(settings: GatewaySettings, port: int) -> asyncio.Task[None]:
    most = settings.max_grpc_connections_per_client
    most = most or max(_max_grpc_connections(settings) // 4, _LEAST_PER_GRPC_CLIENT)
    return asyncio.create_task(ClientConnections(port, most).watch())


def _make_engine(settings: GatewaySettings, gateway: Gateway, files: ModelFiles, kv_events: KvEventStreams) -> Engine:
    tokenizer = TokenizerArchive(files.folder, settings.chat_template)
    return Engine(gateway, read_facts(files, settings.public_root), tokenizer, kv_events)


def _make_grpc_server(
    settings: GatewaySettings, gateway: Gateway, engine: Engine, keys: KeySource | None, tls: TlsFiles | None
) -> GrpcServer:
    num_reading = gateway.bodies.max_bytes // (_COPIES * gateway.max_body_bytes)
    server = GrpcServer(
        settings.host,
        settings.grpc_port,
        [
            *transport_options(max_receive_bytes=gateway.max_body_bytes, lookahead_bytes=_LOOKAHEAD_BYTES),
            ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_S)),
            ("grpc.max_connection_idle_ms", int(1000 * _IDLE_CALLS_S)),
            ("grpc.max_allowed_incoming_connections", _max_grpc_connections(settings)),
        ],
        gate=MessageGate(max_reading=min(max(num_reading, 1), _MAX_READING), max_waiting=settings.max_live_requests),
        # KV events show the prompts of all users. --insecure opens the API, but not these events.
        first=[KeyGate(gateway.access), AdminGate(keys, admin=KV_EVENT_METHODS)],
        tls=tls,
    )
    front = InferenceService(gateway)
    server.add(SERVICE_NAME, lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(front, s))
    vllm, sglang = VllmEngine(engine), SglangScheduler(engine)
    server.add(vllm_engine.SERVICE_NAME, lambda s: add_VllmEngineServicer_to_server(vllm, s))
    open_inference = KServeInference(engine)
    server.add(kserve.SERVICE_NAME, lambda s: add_GRPCInferenceServiceServicer_to_server(open_inference, s))
    server.add(sglang_scheduler.SERVICE_NAME, lambda s: add_SglangSchedulerServicer_to_server(sglang, s))
    return server


def _open_stores(settings: GatewaySettings) -> Stores | None:
    url, ttl_s, max_bytes = settings.response_store, settings.response_ttl_s, settings.response_store_bytes
    try:
        return open_stores(url, ttl_s=ttl_s, max_bytes=max_bytes)
    except OSError as error:  # the user has no home
        _log.warning("nothing is stored: there is no state folder; set response_store", error=str(error))
        return None


def _make_batches(
    settings: GatewaySettings, gateway: Gateway, stores: Stores | None, apis: Sequence[OtherApi]
) -> Batches:
    """`apis`: a batch may call their paths, too."""
    return Batches(
        gateway,
        stores.documents if stores is not None else None,
        endpoints_of([*generation_routes(gateway), *(route for api in apis for route in api.routes)]),
        FileLimits(settings.max_file_bytes, settings.max_files_bytes, settings.file_ttl_s),
        lines=settings.batch_lines,
        all_lines=settings.all_batch_lines,
    )


def _make_http_server(
    settings: GatewaySettings, gateway: Gateway, apis: Sequence[OtherApi], tls: TlsFiles | None
) -> HttpServer:
    hosts = AllowedHosts(settings.hosts, settings.host)
    app: ASGIApp = create_app(gateway, hosts, AllowedOrigins(settings.origins), settings.root_path, apis)
    if settings.origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return HttpServer(
        app,
        settings.host,
        settings.port,
        max_connections=settings.max_connections,
        max_per_client=settings.max_connections_per_client,
        other_connections=_max_grpc_connections(settings),
        head_timeout_s=settings.head_timeout_s,
        send_timeout_s=settings.send_timeout_s,
        tls=ServerTls(tls, _HANDSHAKE_S) if tls is not None else None,
    )


@dataclass(frozen=True, slots=True)
class _ReadModel:
    files: ModelFiles
    tokenizer: TextTokenizer | IdTokenizer
    own: OwnModel
    tokenizer_info: Mapping[str, Any] | None
    formats: ModelFormats


def _read_model(settings: GatewaySettings) -> _ReadModel:
    try:
        folder = resolve_folder(settings.model)
        files = read_model_files(folder)
        tokenizer: TextTokenizer | IdTokenizer
        if (folder / "tokenizer.json").is_file():
            tokenizer = TextTokenizer.from_folder(folder, settings.chat_template)
            if (end := asked_end(folder)) is not None and not tokenizer.ends_texts_with(end):
                _log.warning(
                    "add_eos_token of tokenizer_config.json is ignored, as in transformers 5. tokenizer.json adds no "
                    "end-of-sequence token. If the model needs it, add it to the post-processor in tokenizer.json",
                    eos_token=end,
                    model=str(folder),
                )
        else:
            _log.warning("no tokenizer.json: only token ids are served, and output reads as ids", model=str(folder))
            tokenizer = IdTokenizer(files.vocab_size)
        tokenizer_info = read_tokenizer_info(folder, settings.chat_template) if settings.enable_tokenizer_info else None
        identity = read_identity(folder, with_weights=True)
    except (NoSuchModel, FileNotFoundError, ValueError) as error:
        raise CannotStart(str(error)) from error
    dtype = "" if settings.dtype == "auto" else settings.dtype
    own = OwnModel(settings.model, files.vocab_size, dtype, identity)
    formats = ModelFormats()
    if isinstance(tokenizer, TextTokenizer):
        formats = model_formats(
            tokenizer.template_source, tokenizer.added_tokens, settings.tool_call_parser, settings.reasoning_parser
        )
        tokenizer.show_markers(formats.markers)
    return _ReadModel(files, tokenizer, own, tokenizer_info, formats)


def _make_session(settings: GatewaySettings, model: _ReadModel, tls: TlsFiles | None) -> SchedulerSession:
    return SchedulerSession(
        settings.scheduler,
        model_name=settings.model_name,
        max_live=settings.max_live_requests,
        wait_s=settings.scheduler_wait_s,
        ping_timeout_s=settings.ping_timeout_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        difference=model.own.difference,
        tls=tls,
    )


def _make_gateway(
    settings: GatewaySettings, model: _ReadModel, session: SchedulerSession, keys: KeySource | None
) -> Gateway:
    builder = RequestBuilder(
        model.tokenizer, model.files, worker_model=lambda: session.model, max_model_len=settings.max_model_len
    )
    requests = RequestStore(
        grace_s=settings.resume_grace_s, keep_s=settings.resume_keep_s, max_bytes=settings.resume_keep_bytes
    )
    metrics = GatewayMetrics(
        settings.model_name, TenantMetrics(settings.tenant_names, settings.metrics_tenants), session.trace
    )
    if settings.vllm_metrics:
        names = VllmMetrics(metrics, settings.model_name, lambda: session.load, lambda: builder.max_model_len)
        metrics.registry.register(names)
    return Gateway(
        settings.model_name,
        builder,
        session,
        metrics,
        RequestLog(settings.model_name, enabled=settings.log_requests),
        model_root=settings.model,
        trust_request_chat_template=settings.trust_request_chat_template,
        force_include_usage=settings.force_include_usage,
        return_tokens_as_token_ids=settings.return_tokens_as_token_ids,
        tokenizer_info=model.tokenizer_info,
        formats=model.formats,
        requests=requests,
        max_body_bytes=settings.max_body_bytes or default_max_body_bytes(builder.max_model_len),
        max_embedding_body_bytes=settings.max_body_bytes or MOST_BODY_BYTES,
        bodies=Bodies(settings.max_bodies_bytes),
        objectives=settings.objective_priorities,
        access=AccessControl(keys, open_metrics=settings.open_metrics),
        spans=open_spans(settings),
    )


def _start_periodic_work(
    gateway: Gateway, responses: Responses, batches: Batches, http_server: HttpServer, keys: KeySource | None
) -> list[asyncio.Task[None]]:
    """The tasks end only when they are cancelled."""
    work = [_tick(gateway.requests), _watch_lag(gateway.metrics), _trim_at_rest(gateway.bodies), http_server.watch()]
    work += [responses.watch(), batches.watch()]
    work += [keys.watch()] if keys is not None else []
    return [asyncio.create_task(each) for each in work]


async def _beside(background: Sequence[asyncio.Task[Any]], work: Coroutine[Any, Any, object]) -> None:
    """Run the work. Raises RuntimeError as soon as a background task ends: otherwise the gateway would look healthy and
    serve no request."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait([working, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                error = None if task.cancelled() else task.exception()
                _log.error("a task of the gateway has failed", task=task.get_name(), exc_info=error)
                raise RuntimeError("a task of the gateway has failed") from error
        working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _tick(requests: RequestStore) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        requests.tick()


async def _trim_at_rest(bodies: Bodies) -> None:
    trimmed = before = 0
    while True:
        await asyncio.sleep(_TRIM_S)
        freed = bodies.num_released
        if freed == before and freed - trimmed >= _TRIMMED_BYTES:
            await asyncio.to_thread(trim_memory)
            trimmed = freed
        before = freed


async def _watch_lag(metrics: GatewayMetrics) -> None:
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(_WATCH_S)
        metrics.event_loop_lag_s.observe(max(time.perf_counter() - began_s - _WATCH_S, 0.0))


async def _drain(gateway: Gateway, http_server: HttpServer, grpc_server: GrpcServer, drain_s: float) -> None:
    """Wait for the open connections and calls, at most `drain_s`. New HTTP connections are already refused, new gRPC
    calls are refused from now on."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    _log.info("draining", live=gateway.metrics.live_requests, drain_s=drain_s)
    calls_ended = asyncio.create_task(grpc_server.stop(drain_s + _LAST_WORDS_S))

    def drained() -> bool:
        idle_over = loop.time() >= began_s + _IDLE_CONNECTIONS_S or not http_server.num_connections
        answered = not http_server.num_running and not http_server.has_unsent
        return calls_ended.done() and answered and idle_over

    while not drained() and loop.time() < began_s + drain_s:  # noqa: ASYNC110 - polled once in a gateway's life
        await asyncio.sleep(_DRAIN_POLL_S)
    if gateway.metrics.live_requests:
        _log.warning("the drain time is over; live requests fail", live=gateway.metrics.live_requests)
