"""The state that the HTTP API and the gRPC API share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from services.gateway.access.caller import Caller
from services.gateway.access.control import AccessControl
from services.gateway.access.quotas import Charge
from services.gateway.admission.parse_limiter import ParseLimiter
from services.gateway.engine.idempotency import RequestKey
from services.gateway.engine.request import GenerateJob, RequestBuilder
from services.gateway.engine.request_store import Reading, RequestStore, read_once
from services.gateway.engine.sequence_run import SequenceRun
from services.gateway.engine.session import SchedulerSession
from services.gateway.errors import ApiError, Gone, invalid
from services.gateway.http.body import Bodies, HeldBody, TooManyBodies, read_body
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.body_parser import BodyParser, is_small
from services.gateway.openai.schema import R
from services.gateway.outcome import SequenceOutcome
from services.gateway.parsing.formats import ModelFormats
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.request_log import RequestLog
from services.runtime.logs import bind_trace_id
from services.runtime.tracing.context import current_context

if TYPE_CHECKING:
    from services.gateway.telemetry.request_spans import RequestSpan
    from services.runtime.tracing.spans import SpanExport

_OnOutcome = Callable[[SequenceOutcome], None]


@dataclass(slots=True)
class Gateway:
    """A running gateway."""

    model_name: str
    builder: RequestBuilder
    session: SchedulerSession
    metrics: GatewayMetrics
    log: RequestLog
    model_root: str = ""  # the checkpoint's folder or hub name
    trust_request_chat_template: bool = False
    force_include_usage: bool = False  # in every event of a stream
    return_tokens_as_token_ids: bool = False  # where a request does not say
    tokenizer_info: Mapping[str, Any] | None = None  # what /tokenizer_info shows; None: it is off
    formats: ModelFormats = field(default_factory=ModelFormats)
    requests: RequestStore = field(default_factory=RequestStore)
    max_body_bytes: int = 2**20
    max_embedding_body_bytes: int = 2**20  # thousands of inputs, each within the context
    body_timeout_s: float = 60.0
    draining: bool = False
    parse_limiter: ParseLimiter = field(default_factory=ParseLimiter)
    parser: BodyParser = field(default_factory=BodyParser)
    bodies: Bodies = field(default_factory=lambda: Bodies(256 * 2**20))
    objectives: Mapping[str, float] = field(default_factory=dict)  # priorities by the name of an objective
    access: AccessControl = field(default_factory=AccessControl)
    spans: SpanExport | None = None  # None: no request is traced
    _num_online: Counter[str] = field(default_factory=Counter)  # online sequences in flight, by the name of the API key

    @property
    def ready(self) -> bool:
        """A request would be served now: the session is ready, and the gateway is not draining."""
        return self.session.ready and not self.draining

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served. No name means the served model."""
        if name and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:120]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_generates(self) -> None:
        """Raises ApiError 400 if the workers are known to serve an embedding model. Otherwise the scheduler checks."""
        model = self.session.model
        if model is not None and model.HasField("embedding"):
            message = (
                f"the model {self.model_name!r} is an embedding model, which generates no text: use /v1/embeddings"
            )
            raise invalid("model", message, code="embedding_model")

    def check_template(self, source: str | None) -> None:
        """Raises ApiError 400 for a chat template of a request, unless the operator trusts such templates."""
        if source is not None and not self.trust_request_chat_template:
            raise invalid(
                "chat_template",
                "chat_template is refused: this server runs templates of requests only with "
                "--trust-request-chat-template",
                code="unsupported_value",
            )

    @contextmanager
    def held_body(self) -> Iterator[HeldBody]:
        """Counts a request's body until it has become jobs. Raises ApiError 429 if all bodies together exceed
        `bodies.max_bytes`."""
        with self.bodies.hold() as held:
            try:
                yield held
            except TooManyBodies:
                message = f"the bodies of all requests that are being read have more than {self.bodies.max_bytes} bytes"
                raise self.session.refusal(message) from None

    def refusal_if_full(self) -> ApiError | None:
        """A 429 if a new request would be refused. Call this before any work for the request."""
        if self.parse_limiter.is_full:
            return self._parse_queue_is_full()
        return self.session.refusal_if_full()

    def check_capacity(self, key: RequestKey | None = None) -> None:
        """Raises ApiError 503 while the workers serve another model, and the error of refusal_if_full(). Raises neither
        if the gateway holds the key's request already."""
        if key is None or not self.requests.has(key):
            self.session.check_mismatch()
        if (key is None or not self.requests.has(key)) and (error := self.refusal_if_full()) is not None:
            raise error

    @contextmanager
    def entering(self, *, new: bool) -> Iterator[None]:
        """The context of a request from its head until its submission. Refuses a new request before its body is read:
        raises ApiError 429 and 503."""
        if not new:  # it may already run
            yield
            return
        self.session.check_mismatch()
        if self.parse_limiter.is_full:
            raise self._parse_queue_is_full()
        with self.session.entering():
            yield

    async def wait_to_parse(self, gone: Callable[[], bool] = lambda: False, *, num_bytes: int, new: bool) -> None:
        """Wait until a request of `num_bytes` may be parsed and submitted. `new`: the request cannot be running yet.

        Raises ApiError 429 if the limits are reached meanwhile, and Gone if its client has gone.
        """

        def check() -> Exception | None:
            if gone():
                return Gone()
            return self.session.refusal_if_full() if new else None

        if self.parse_limiter.is_full:
            raise self._parse_queue_is_full()
        await self.parse_limiter.wait_turn(check, num_bytes=num_bytes)

    async def read_request(
        self, cls: type[R], request: Request, held: HeldBody, *, new: bool = False, kind: str = "", max_bytes: int = 0
    ) -> tuple[R, bytes]:
        """Read the body at once, and parse it when it is the request's turn. With a `kind` also returns the fingerprint
        of its fields. `max_bytes`: another limit than that of the gateway.

        Raises what read_body, wait_to_parse and BodyParser.parse raise.
        """
        body = await read_body(request, held, max_bytes=max_bytes or self.max_body_bytes, timeout_s=self.body_timeout_s)
        gone = request.scope[CONNECTION].has_gone
        await self.wait_to_parse(gone, num_bytes=len(body) if is_small(body) else 0, new=new)
        return await self.parser.parse(cls, body, self.builder.max_model_len, kind=kind, gone=gone)

    def refused(self, endpoint: str, request_id: str, error: ApiError) -> None:
        """Count a request that got an error before it reached the scheduler."""
        self.metrics.refused(endpoint, error)
        self.log.refused(request_id, endpoint, error.status, error.message)

    def count_gone(self) -> None:
        """Count a client that has gone before any work for its request."""
        self.metrics.gone_requests += 1

    def _parse_queue_is_full(self) -> ApiError:
        return self.session.refusal("too many requests wait to be parsed")

    def open(self, jobs: Sequence[GenerateJob], key: RequestKey | None, caller: Caller) -> Reading:
        """Read the output of these jobs. Jobs of a known idempotency key are not submitted or charged again, unless the
        kept request has failed or cannot answer this client (RequestStore.open).

        Raises ApiError: 422 if the key belongs to another request, 429 and 503 from the session, 400 and 429 from the
        caller's quotas.
        """
        if key is None:
            return read_once(self._submit(jobs, caller))
        num_delivered = max(len(job.delivered) for job in jobs)
        reading = self.requests.open(key, partial(self._submit, jobs, caller), num_delivered=num_delivered)
        if (first := reading.generations[0].job) is not jobs[0]:
            self.log.taken_up(jobs[0].request_id, first.metadata.answer_id or first.request_id, first.request_id)
        return reading

    def num_online_for(self, caller: Caller) -> int:
        """The online sequences in flight that the caller may know of: all, if the caller may read /metrics, which shows
        all tenants; otherwise those of its own API key."""
        if self.access.may_know_load(caller):
            return self._num_online.total()
        return self._num_online[caller.owner]

    def _submit(self, jobs: Sequence[GenerateJob], caller: Caller) -> list[SequenceRun]:
        """Submit all jobs, or none."""
        if (count := len(jobs)) > (most := self.session.max_live):  # a retry after a 429 could never succeed
            name = "input" if jobs[0].metadata.pooling else "n"
            raise invalid(name, f"{name}: {count} sequences for all prompts; at most {most} can be in flight here")
        runs: list[SequenceRun] = []
        charge = self._charge(jobs, caller)
        is_online = not jobs[0].metadata.offline
        span = self._start_span(jobs)
        context = current_context() if span is None else span.context
        log = self.log.entry(len(jobs), caller.owner)
        observers = [observer for observer in (log, None if span is None else span.ended) if observer is not None]
        on_outcome = self._on_outcome(charge, observers, caller.owner, is_online)
        first = None
        try:
            for job in jobs:
                if context is not None:
                    job.metadata.trace_id = context.trace_id
                    job.metadata.span_id = context.span_id if context.sampled else ""
                first = first if job.sample else None
                runs.append(SequenceRun(job, self.session, self.metrics, first, on_outcome))
                self._num_online[caller.owner] += is_online
                first = first or runs[-1]
        except ApiError as error:
            for run in runs:
                run.close()
            if charge is not None:
                charge.cancel()
            if span is not None:
                span.refused(error)
            raise
        return runs

    def _start_span(self, jobs: Sequence[GenerateJob]) -> RequestSpan | None:
        """The span of a client's request, a child of the client's span. Its trace id is on all further log lines."""
        if self.spans is None:
            return None
        from services.gateway.telemetry.request_spans import RequestSpan  # only with OpenTelemetry's packages

        span = RequestSpan(
            self.spans,
            self.model_name,
            current_context(),
            endpoint=jobs[0].endpoint,
            num_sequences=len(jobs),
            arrival_s=jobs[0].arrival_s,
            sampling=jobs[0].sampling,
        )
        bind_trace_id(span.context.trace_id)
        return span

    def _on_outcome(
        self, charge: Charge | None, observers: Sequence[_OnOutcome], owner: str, is_online: bool
    ) -> _OnOutcome:
        def ended(outcome: SequenceOutcome) -> None:
            self._num_online[owner] -= is_online
            if charge is not None:
                charge.ended(outcome)
            for observer in observers:
                observer(outcome)

        return ended

    def _charge(self, jobs: Sequence[GenerateJob], caller: Caller) -> Charge | None:
        if caller.key is None:
            return None
        delivered = sum(len(job.delivered) for job in jobs)
        # A beam search shows few of the tokens that it computes: it is charged for all that it may compute.
        beams = sum(job.sampling.max_tokens * job.beam.width for job in jobs if job.beam is not None)
        output = sum(job.sampling.max_tokens for job in jobs if job.beam is None)
        return self.access.quotas.charge(
            caller.key,
            num_sequences=len(jobs),
            # Samples share the prompt. Delivered output is computed like a prompt, and may be any text.
            prompt=sum(len(job.prompt_ids) for job in jobs if not job.sample) + delivered + beams,
            output=max(output - delivered, 0),
            delivered=delivered,
            offline=jobs[0].metadata.offline,
        )
