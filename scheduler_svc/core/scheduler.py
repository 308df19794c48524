"""The scheduler's state machine: events in, messages out.

A public method either applies an event (a message, a new or broken connection, the passing of time) or reads the state.
No method does I/O: messages gather until `poll` returns them. The same events give the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.v1.cache_pb2 import CacheServiceLinkResponse
from paceline.v1.common_pb2 import FINISH_REASON_ABORT, FINISH_REASON_ERROR
from paceline.v1.inference_pb2 import SchedulerLoad, SessionOpened, SessionRequest, Submission
from paceline.v1.worker_pb2 import (
    GrammarPrepared,
    Heartbeat,
    StepFailure,
    StepResult,
    WorkerRegistered,
    WorkerRegistration,
    WorkerReleased,
    WorkerServiceLinkResponse,
)
from scheduler_svc.core.admission.budgets import Budgets, ClassBudgets
from scheduler_svc.core.admission.validation import (
    Limits,
    check_limits,
    check_queue,
    check_registration,
    check_submission,
    explain_rejection,
    is_sample_of,
    new_request,
    queue_credit,
    trace_of,
)
from scheduler_svc.core.cache.link import CacheLink, ProtocolError
from scheduler_svc.core.cache.namespaces import CacheNamespaces
from scheduler_svc.core.faults.retry_groups import RetryGroups
from scheduler_svc.core.faults.suspects import Absence, Loss, Suspects
from scheduler_svc.core.lifecycle.beam_groups import BeamGroups, check_beam
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.lifecycle.recovery import Recovery
from scheduler_svc.core.output.sessions import Publisher, Session
from scheduler_svc.core.output.trace_phases import EndedRequests
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.rejection import CODE_INVALID_ARGUMENT, Rejection, failed_precondition, invalid
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.status import StatusReport
from scheduler_svc.core.step.decide import Decider
from scheduler_svc.core.step.drafting import Drafting
from scheduler_svc.core.step.emit import Emitter
from scheduler_svc.core.step.exchange import StepExchanges
from scheduler_svc.core.step.policy_failures import PolicyFailures
from scheduler_svc.core.step.results import ResultReader
from scheduler_svc.core.step.rounds import Rounds
from scheduler_svc.core.step.schedule import StepScheduler
from scheduler_svc.core.step.step_log import StepLog
from scheduler_svc.core.step.trace_log import TraceLog
from scheduler_svc.core.types import Failure, Outbox, SchedulerConfig, SchedulerCounters
from scheduler_svc.core.workers.batch import Batch
from scheduler_svc.core.workers.slots import SlotLedger
from scheduler_svc.core.workers.state import DEFAULT_WINDOW, WorkerState
from scheduler_svc.core.workers.step_time import FleetStepTimes, OutputLength

MAX_REASON_CHARS = 400  # of a worker's reason for refusing a grammar


class SchedulerCore:
    """One scheduler: its sessions, queue, workers, policies and cache link.

    Times are seconds on a clock that never goes back. Calls must not overlap.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policies: Policies,
        fallback: Callable[[], Policies],
        epoch: int,
        on_policy_error: Callable[[Exception], None] = lambda error: None,
        cache_secret: bytes = b"",
        traces: EndedRequests | None = None,
    ) -> None:
        """`fallback` makes the policies that schedule a step when the current ones fail. `cache_secret`: as in
        CacheNamespaces. `traces` gets the traced requests that have ended; None: no request is traced."""
        self.config = config
        self.namespaces = CacheNamespaces(config.cache_scope, cache_secret)
        self.epoch = epoch
        self.fence = 0  # the epoch, if it comes from an election
        self.counters = SchedulerCounters()
        self.workers: dict[int, WorkerState] = {}
        self.sessions: dict[str, Session] = {}
        self.limits: Limits | None = None  # of the last workers seen; kept while none is attached
        self._publisher = Publisher(self.sessions)
        self._outbox = Outbox()
        self._next_worker = 1
        self._step_times = FleetStepTimes()
        cache = self._cache = CacheLink(epoch)
        budgets = ClassBudgets(Budgets(config), Budgets(config))
        output_length = OutputLength()
        step_scheduler = self._step_scheduler = StepScheduler(
            policies, fallback, self.counters, on_policy_error, budgets, self._step_times, output_length
        )
        self.queue = step_scheduler.queue
        life = self.life = Lifecycle(
            config, self.queue, budgets, cache, self.workers, self.sessions, self.counters, output_length
        )
        life.traces = traces
        self.timeline = life.timeline
        self.step_log, self.trace_log = StepLog(), TraceLog()
        self._recovery = Recovery(cache, self.workers, life)
        self._groups = BeamGroups(life)
        self._retry_groups = RetryGroups(life, Suspects(config.poison_failures))
        emitter = Emitter(cache, life.swaps, self._publisher, self.namespaces, self.counters, life.timeline)
        self._exchanges = StepExchanges(
            self.workers, cache, step_scheduler, emitter, life, self._groups, self._send_worker
        )
        drafting = Drafting(life)
        self._rounds = Rounds(
            self.workers,
            cache,
            step_scheduler,
            Decider(life),
            self._exchanges,
            life,
            self._groups,
            self._retry_groups,
            drafting,
        )
        self._results = ResultReader(life, self._publisher, self._groups, drafting, self.step_log, self.trace_log)
        self._status = StatusReport(config, self.workers, self.sessions, self.queue.online, cache)
        self._note_outage()

    @property
    def policies(self) -> Policies:
        """The policies for the next step."""
        return self._step_scheduler.policies

    @property
    def policy_failures(self) -> PolicyFailures:
        """Failures since the policies were last set."""
        return self._step_scheduler.failures

    @property
    def has_cache(self) -> bool:
        """Whether the cache answers."""
        return self._cache.connected

    def event_at(self, now_s: float) -> None:
        """Set the time of the next event. Without this call, it is the time of the last `poll` or `tick`."""
        self.life.now_s = now_s

    def set_policies(self, policies: Policies) -> None:
        """Set other policies from the next step on. Raises what their order raises; then nothing has changed."""
        self._step_scheduler.set_policies(policies, self.workers)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_session(self, session_id: str, window: int) -> None:
        """Raises Rejection if the id is taken or the window is 0."""
        if session_id in self.sessions:
            raise failed_precondition("session_id", f"session {session_id!r} is open already")
        if window < 1:
            raise invalid("response_window", "must be at least 1")
        session = self._publisher.open(session_id, window)
        session.opened = SessionOpened(epoch=self.epoch, fence=self.fence)
        session.status = self._status.now(self.limits)

    def close_session(self, session_id: str) -> None:
        """The gateway is gone, and so are its requests."""
        if (session := self.sessions.pop(session_id, None)) is not None:
            for request in list(session.live.values()):
                self.life.end(request, FINISH_REASON_ABORT)
            self._publisher.closed(session)

    def session_message(self, session_id: str, message: SessionRequest, now_s: float) -> None:
        """A gateway's message: requests, cancellations, and how many responses it has read. A request that is refused
        gets an answer with the reason; the session goes on. Raises KeyError if no such session is open."""
        session = self.sessions[session_id]
        session.read = max(session.read, min(message.responses_read, session.sent))
        session.num_submissions += sum(not submission.offline for submission in message.submissions)
        for submission in message.submissions:
            try:
                self._submit(session, submission, now_s)
            except Rejection as rejection:
                self.counters.rejected += 1
                ending = session.add_ending()
                ending.handle = submission.handle
                explain_rejection(ending, rejection)
        for handle in message.cancels:
            if (request := session.live.get(handle)) is not None:
                self.life.end(request, FINISH_REASON_ABORT)

    def release_conversation(self, name: str) -> None:
        """End a conversation. Raises KeyError if it is not known."""
        self.life.conversations.release(name)

    def _submit(self, session: Session, submission: Submission, now_s: float) -> None:
        request = new_request(session.id, submission, now_s)
        changes_logits = check_submission(request, submission)
        if self.life.traces is not None and submission.span_id:
            request.trace = trace_of(submission)
        # From here on the salt is the name of a namespace, and not what the client sent.
        request.metadata.cache_salt = self.namespaces.name(request.metadata.tenant, request.metadata.cache_salt)
        if is_search := submission.HasField("beam"):
            check_beam(submission)
        if self.limits:
            check_limits(request, self.limits, changes_logits)
        if request.handle in session.live:
            raise failed_precondition("handle", f"{request.handle} is in use")
        request.arrival_index = request.queue_position = request.family.siblings.first = next(self.life.arrival_indexes)
        parent = session.live.get(submission.fork_of) if submission.fork_of else None
        if parent is not None and not is_sample_of(parent, request):
            parent = None
        if parent is not None:  # samples are one request: the queue was checked for the first sample
            request.family.siblings = parent.family.siblings
            if not (request.output or request.needs_whole_prompt):
                request.family.parent = parent
                request.family.samples = parent.family.samples = parent.family.samples or [parent]
                request.family.samples.append(request)
        elif not request.metadata.accepted_before:  # no accepted request is lost
            check_queue(self.queue, request, self.config, self.life.budgets)
        self.life.conversations.join(request, now_s)
        self.life.accept(session, request, enqueue=not (is_search and self.limits))
        for worker in self.workers.values():
            worker.want_grammar(request, early=True)
        if is_search:
            self._groups.start(request, submission.beam, self.limits)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def register_worker(self, registration: WorkerRegistration) -> int:
        """Attach a worker. Returns its id. Raises Rejection if a size of the worker is out of range, or if the worker
        does not match the attached workers or the live requests."""
        others = [worker.registration for worker in self.workers.values()]
        live = any(session.live for session in self.sessions.values())
        check_registration(registration, others, self.limits if live else None, self.config.allow_mixed_dtypes)
        sizes = registration.max_num_seqs, registration.max_batched_tokens, self.config.max_num_seqs
        may_draft = self.config.speculative_tokens > 0 and registration.verifies_drafts
        asked = registration.window or DEFAULT_WINDOW
        if may_draft:  # beside others, a sequence with drafts has a row in one of so many steps
            asked = min(asked, DEFAULT_WINDOW)
        worker = WorkerState(
            id=self._next_worker,
            registration=registration,
            window=self.config.window or asked,
            window_is_set=self.config.window > 0,
            batch=Batch(SlotLedger(min(filter(None, sizes)), registration.block_size)),
            available_blocks=0,  # until the cache has answered
            prefix_caching=self.config.prefix_caching,
            may_draft=may_draft,
            linked_s=self.life.now_s,
            kept=list(registration.kept),
        )
        registration.ClearField("kept")  # it may be large, and is needed only once
        self._next_worker += 1
        self.workers[worker.id] = worker
        if worker.incarnation:
            self._retry_groups.suspects.came_back(worker.incarnation)
        registered = WorkerRegistered(worker=worker.id, epoch=self.epoch, window=worker.window, fence=self.fence)
        self._send_worker(worker.id, WorkerServiceLinkResponse(registered=registered))
        self._workers_changed()
        if self._cache.connected:
            self._cache.added[worker.id] = self._recovery.added(worker)
        return worker.id

    def worker_result(self, worker_id: int, result: StepResult) -> None:
        """A step's result. Raises ProtocolError; then the worker's link is to be closed."""
        worker = self.workers[worker_id]
        num_tokens = self._results.apply(worker, result, self.life.now_s)
        self.counters.tokens += num_tokens
        worker.num_pauses = 0 if num_tokens else worker.num_pauses

    def worker_heartbeat(self, worker_id: int, heartbeat: Heartbeat) -> None:
        """A worker that sends heartbeats but makes no progress is lost. Raises ProtocolError if a result is missing."""
        worker = self.workers[worker_id]
        oldest = worker.in_flight[0].step if worker.in_flight else 0
        if heartbeat.step >= (oldest or worker.steps_sent + 1):
            raise ProtocolError(f"a heartbeat after step {heartbeat.step}, which has no result")
        if not worker.registration.heartbeats:
            return  # a worker of an older version does not report its progress
        if stall := worker.progress.find_stall(heartbeat, oldest, self.config.stall_s):
            self._outbox.lost_workers.append((worker_id, stall))
            # If the plan has not arrived, the link is to blame.
            self.worker_lost(worker_id, Loss.FAULT if heartbeat.received >= oldest else Loss.LINK)

    def worker_grammar(self, worker_id: int, prepared: GrammarPrepared) -> None:
        """A worker has prepared or refused a grammar. A refusal fails its waiting requests. Raises ProtocolError."""
        grammar = self.workers[worker_id].grammars.answered(prepared.id, not prepared.refused)
        if grammar is None:
            raise ProtocolError(f"an answer about grammar {prepared.id}, for which the worker was not asked")
        if not prepared.refused:
            return
        for request in [request for request in self.queue if request.grammar == grammar]:
            if request.phase is not Phase.ENDED:
                self.life.fail(request, prepared.refused[:MAX_REASON_CHARS], CODE_INVALID_ARGUMENT)

    def worker_drain(self, worker_id: int) -> None:
        """The worker finishes its running requests and gets no more. Its swapped-out requests run on another worker."""
        self.workers[worker_id].draining = True
        self.life.recompute(self.workers[worker_id].host.swapped.values())
        self._workers_changed()

    def worker_failed(self, worker_id: int, failure: StepFailure) -> None:
        """The worker reports that a step has failed, and that it forgets everything it ran. Raises ProtocolError."""
        worker, first, last = self.workers[worker_id], failure.first_step, failure.last_step
        if not (worker.in_flight and worker.in_flight[0].step <= first <= last <= worker.in_flight[-1].step):
            raise ProtocolError(f"failure of steps {first} to {last}, which are not in flight")
        self._lose(worker, f"{_steps(first, last)} of worker {worker_id} failed: {failure.message}", first, last)

    def worker_lost(self, worker_id: int, loss: Loss = Loss.LINK) -> None:
        """The worker's link is gone: its requests go back to the queue with the tokens they have."""
        if (worker := self.workers.get(worker_id)) is None:
            return
        absence = None
        if worker.incarnation and loss is not Loss.FAULT:
            absence = Absence(worker.incarnation, loss, self._retry_groups.clock_s)
        if worker.in_flight and not worker.draining:  # a draining worker may stop in a step, when its time is up
            first, last = worker.in_flight[0].step, worker.in_flight[-1].step
            self._lose(worker, f"worker {worker_id} was lost in {_steps(first, last)}", first, last, absence)
        else:
            self._lose(worker, "its worker was lost")
        newer = (one for one in self.workers.values() if one.id > worker_id)
        if any(one.incarnation == worker.incarnation for one in newer):  # the same process has registered again already
            self._retry_groups.suspects.came_back(worker.incarnation)

    def _lose(
        self, worker: WorkerState, why: str, first: int = 0, last: int = 0, absence: Absence | None = None
    ) -> None:
        """Remove the worker. Requests in steps `first` to `last` are blamed. Steps count from 1; 0: no step failed."""
        del self.workers[worker.id]
        self._step_times.left(worker.step_fit)
        self.timeline.worker_gone(worker.id)
        if self._cache.connected:
            self._cache.forget_worker(worker.id)
        blamed, num_rows, num_steps = worker.in_steps(first, last)
        evacuated = self.life.evacuate(worker, why, blamed)
        poisoned = self._retry_groups.blame(blamed, num_rows, num_steps, why, absence)
        self._retry_groups.worker_lost(worker.id, blamed)
        for request in evacuated:
            if request is poisoned:
                self.life.fail_poisoned(request, why)
            elif request.phase is not Phase.ENDED:  # a beam ends together with a poisoned beam of the same search
                # The cache drops the request's old sequence with the worker. If an exchange in flight admits the
                # request and the cache refuses, StepExchanges.answered frees the sequence.
                self.life.enqueue(request)
        self.life.recompute(worker.host.swapped.values())
        if num_steps:
            retried = [request.request_id for request in blamed if request is not poisoned]
            self.counters.failures += 1
            self.counters.retried += len(retried)
            name = poisoned.request_id if poisoned else ""
            self._outbox.failures.append(Failure(worker.id, why, retried, name, _traces(blamed)))
        self._workers_changed()

    def _workers_changed(self) -> None:
        self._step_scheduler.fleet_changed()
        if self._status.has_worker:
            self.life.timeouts.worker_attached()
        if self.workers:
            first = next(iter(self.workers.values())).registration
            pool = max(worker.num_blocks * worker.block_size for worker in self.workers.values())
            fresh = self.limits is None or self.limits.model.fingerprint != first.model.fingerprint
            self.limits = Limits(first.model, pool, max(w.registration.max_loras for w in self.workers.values()))
            self._cache.model = first.model.fingerprint
            if fresh:
                for request in list(self.queue):  # accepted before the model was known
                    try:
                        check_limits(request, self.limits)
                    except Rejection as rejection:
                        self.life.end(request, FINISH_REASON_ERROR, rejection)
                if self._cache.connected:
                    self.life.ask_all_matches()  # in the model's namespace
            self._groups.model_known(self.limits)
        self._note_outage()
        self._status.announce(self.limits)

    def _note_outage(self) -> None:
        reason = detail = ""
        if not self._cache.connected:
            reason, detail = "no-cache", "the cache does not answer"
        elif not self._status.has_worker:
            reason, detail = "no-worker", "no worker takes requests"
        self.timeline.out(reason, detail, self.life.now_s)

    # ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────

    def cache_connected(self, epoch: int) -> None:
        """A new link: the cache knows nothing, so everything is added again."""
        self._cache.forget()
        self._cache.epoch, self._cache.connected = epoch, True
        self._recovery.begin()
        self.life.ask_all_matches()
        self._workers_changed()

    def cache_lost(self) -> None:
        """The cache's block tables are gone, but not the KV on the workers. Running requests go on with a new cache."""
        self._recovery.cache_lost()
        self._workers_changed()

    def cache_response(self, response: CacheServiceLinkResponse) -> None:
        """The answer to an exchange. Raises ProtocolError; then the cache's link is to be closed."""
        sent = self._cache.receive(response)
        if self.trace_log.num_readers:
            self.trace_log.exchange_ended(response, self.life.now_s)
        for counters in response.pools:
            if (worker := self.workers.get(counters.worker)) is not None:
                worker.available_blocks = counters.free_blocks + counters.cached_blocks
                worker.host.free_blocks = counters.free_host_blocks + counters.cached_host_blocks
        self.life.holdings.set_matches(sent.matched(response))
        self.life.holdings.set_matches((update.sequence, update.matches) for update in response.match_updates)
        if sent.restores:
            self._recovery.answered(sent, response)
        for worker in sent.awaiting_cache:
            worker.knows_cache = True
        if sent.swap_outs:
            self.life.recompute(self.life.swaps.answered(sent.swap_outs, response))
        for moves in response.demotions:
            if (worker := self.workers.get(moves.worker)) is not None:
                worker.host.add_demotions(moves.device_blocks, moves.host_blocks)
        self._exchanges.answered(sent, response)

    # ── time and output ──────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_s: float) -> None:
        """To be called a few times a second."""
        self.life.now_s = now_s
        if not self._status.has_worker:
            self.life.timeouts.no_worker(now_s)
        self.life.conversations.expire(now_s)
        self.life.budgets.online.measure(now_s, self.queue.online.tenant_tokens)
        self.life.budgets.offline.measure(now_s, self.queue.offline.tenant_tokens)
        self.life.end_late(now_s)
        for request, why in self._retry_groups.find_poisoned():
            if request.phase is not Phase.ENDED:  # a beam ends together with a poisoned beam of the same search
                self.life.fail_poisoned(request, why)
                self._outbox.failures.append(Failure(0, why, [], request.request_id, _traces([request])))

    def load(self, now_s: float) -> SchedulerLoad:
        """The load of all workers. Changes nothing."""
        return self._status.load(self.life.budgets.online, self.counters, now_s)

    def poll(self, now_s: float) -> Outbox:
        """Plan whatever can be planned. Returns everything to send."""
        self.life.now_s = now_s
        if (exchange := self._rounds.plan(now_s)) is not None:
            if self.trace_log.num_readers:
                self.trace_log.exchange_sent(exchange, now_s)
            self._outbox.to_cache.append(exchange)
        for worker in self.workers.values():
            if worker.grammars.wanted:
                self._send_worker(worker.id, WorkerServiceLinkResponse(grammars=worker.grammar_orders()))
        credit = queue_credit(self.queue.online, self.config)
        if (not credit) != self._status.announced_full:  # at once: gateways refuse requests while the queue is full
            self._status.announce(self.limits)
        for session in self.sessions.values():
            session.queue_credit = credit
            while (message := session.next_message()) is not None:
                self._outbox.to_sessions.append((session.id, message))
        self._release_drained()
        outbox, self._outbox = self._outbox, Outbox()
        return outbox

    def _release_drained(self) -> None:
        for worker in self.workers.values():
            if worker.draining and worker.is_idle and not worker.released:
                worker.released = True
                self._send_worker(worker.id, WorkerServiceLinkResponse(released=WorkerReleased()))

    def _send_worker(self, worker: int, message: WorkerServiceLinkResponse) -> None:
        if self.trace_log.num_readers:
            self.trace_log.plan_sent(message)
        self._outbox.to_workers.append((worker, message))


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"one of steps {first} to {last}"


def _traces(requests: Iterable[Request]) -> list[str]:
    return list(dict.fromkeys(request.metadata.trace_id for request in requests if request.metadata.trace_id))
