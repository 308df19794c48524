"""The scheduler as a service: makes a core from the settings, and serves it over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.v1 import admin_pb2_grpc, inference_pb2_grpc, live_pb2_grpc, worker_pb2_grpc
from scheduler_svc.admin import Admin
from scheduler_svc.cache_secret import own_secret, read_secret
from scheduler_svc.core.output.trace_phases import EndedRequests
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.links import SchedulerServer
from scheduler_svc.live_view import LiveView
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.policies.registry import KINDS, build, check_given, choose
from scheduler_svc.policy_errors import PolicyErrors
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.standby import StandbyGate, open_election
from services.runtime.keys.admin_gate import AdminGate
from services.runtime.keys.source import open_keys
from services.runtime.logs import get_logger
from services.runtime.metrics import start_metrics_server
from services.runtime.rpc import GrpcServer, link_options
from services.runtime.service import Addresses, CannotStart
from services.runtime.tls.opening import open_tls
from services.runtime.tracing.settings import open_spans

if TYPE_CHECKING:
    from services.runtime.tracing.spans import SpanExport

log = get_logger(__name__)

ADMIN_METHODS = ("/paceline.v1.AdminService/",)
# Without keys these methods are open. With keys they need an admin key: clients use a gateway, which checks quotas.
KEYED_METHODS = ("/paceline.v1.InferenceService/Generate", "/paceline.v1.InferenceService/Embed")


def _cache_secret(settings: SchedulerSettings) -> bytes:
    """The contents of the file that `cache_secret_file` names. Without this setting: empty if etcd will provide the
    secret, else the secret of this user on this machine. Raises CannotStart."""
    if settings.cache_secret_file:
        return read_secret(Path(settings.cache_secret_file))
    return b"" if settings.etcd else own_secret()


def _sequence_spans(export: SpanExport | None) -> EndedRequests | None:
    if export is None:
        return None
    from scheduler_svc.tracing import SequenceSpans  # only with OpenTelemetry's packages

    return SequenceSpans(export)


def config_of(settings: SchedulerSettings) -> SchedulerConfig:
    """The core's part of the settings."""
    return SchedulerConfig(
        window=settings.window,
        max_queued_requests=settings.max_queued_requests,
        max_queued_offline_requests=settings.max_queued_offline_requests,
        max_queued_offline_tokens=settings.max_queued_offline_tokens,
        max_offline_tokens=settings.max_offline_tokens,
        max_queued_tokens=settings.max_queued_tokens,
        speculative_tokens=settings.speculative_tokens,
        speculative_max_rows=settings.speculative_max_rows,
        speculative_ngram_max=settings.speculative_ngram_max,
        speculative_ngram_min=settings.speculative_ngram_min,
        stall_s=settings.heartbeat_timeout_s,
        poison_failures=settings.poison_failures,
        prefix_caching=settings.prefix_caching,
        partial_reuse=settings.partial_reuse,
        host_cache=settings.host_cache,
        max_num_seqs=settings.max_num_seqs,
        tenant_max_running_tokens=settings.tenant_max_running_tokens,
        tenant_max_queued_tokens=settings.tenant_max_queued_tokens,
        waiting_timeout_s=settings.waiting_timeout_s,
        running_timeout_s=settings.running_timeout_s,
        no_worker_timeout_s=settings.no_worker_timeout_s,
        conversation_ttl_s=settings.conversation_ttl_s,
        allow_mixed_dtypes=settings.allow_mixed_dtypes,
        cache_scope=settings.cache_scope,
    )


async def serve(
    settings: SchedulerSettings, stop: asyncio.Event, *, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Run the scheduler until `stop` is set. Raises CannotStart if the policies, the keys, the certificates, the cache
    secret or the tracing cannot be used."""
    keys = open_keys(settings.keys_file)
    overrides = {kind: getattr(settings, kind) for kind in KINDS}
    try:
        choice = choose(settings.preset, overrides, settings.policy_options)
        policies = build(choice)
        check_given(choice, settings.policy_options)
    except PolicyError as error:
        raise CannotStart(str(error)) from error
    tls = open_tls(settings.tls_dir, settings.section)
    # Without an election the epoch is the start time in ms, so that peers notice a restart. An election sets the epoch
    # later, and then peers refuse a leader with a lower one.
    election = open_election(settings) if settings.etcd else None
    epoch = 0 if election else time.time_ns() // 1_000_000
    spans = open_spans(settings)
    core = SchedulerCore(
        config_of(settings),
        policies,
        lambda: build(choose()),
        epoch,
        on_policy_error=PolicyErrors(log.error),
        cache_secret=_cache_secret(settings),
        traces=_sequence_spans(spans),
    )
    transport = link_options(settings.ping_timeout_s)
    server = SchedulerServer(core, settings.cache, transport, settings.heartbeat_timeout_s, election, tls)
    admin = Admin(core, choice)
    gate = AdminGate(keys, admin=ADMIN_METHODS, keyed=KEYED_METHODS, insecure=settings.insecure)
    interceptors = [StandbyGate(election)] if election else []
    grpc_server = GrpcServer(settings.host, settings.port, transport, interceptors, first=[gate], tls=tls)
    grpc_server.add(
        "paceline.v1.InferenceService", lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(server, s)
    )
    grpc_server.add(
        "paceline.v1.WorkerService", lambda s: worker_pb2_grpc.add_WorkerServiceServicer_to_server(server, s)
    )
    grpc_server.add("paceline.v1.AdminService", lambda s: admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, s))
    live = LiveView(core, admin, lambda: server.core_seconds)
    grpc_server.add(
        "paceline.v1.LiveViewService", lambda s: live_pb2_grpc.add_LiveViewServiceServicer_to_server(live, s)
    )
    metrics = SchedulerMetrics(server)
    metrics_server = start_metrics_server(settings.host, settings.metrics_port)
    port = await grpc_server.start()
    working = asyncio.create_task(server.work(grpc_server))
    watching = asyncio.create_task(keys.watch()) if keys is not None else None
    stopping = asyncio.create_task(stop.wait())
    try:
        address = f"{settings.host}:{port}"
        metrics_at = f"{settings.host}:{metrics_server.port}"
        log.info("scheduler listens", grpc=address, metrics=metrics_at)
        if on_ready:
            on_ready(Addresses(grpc=address, http=None, metrics=metrics_at))
        await asyncio.wait([stopping, working], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()  # raises: the core's task ends only with an error
    finally:
        grpc_server.set_serving(False)
        working.cancel()
        if watching is not None:
            watching.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await grpc_server.stop(0.5)
        metrics.close()
        metrics_server.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        if election:
            server.election = None  # close() ends the lease. A call that is still open would step down for that.
            await election.close()
