"""The scheduler's state machine: events in, messages out.

Every public method is an event (a message, a connection that came or went, the passing of time). None of them does I/O;
what is to be sent gathers until `poll` hands it over. Same events, same messages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from sortedcontainers import SortedDict

from paceline.v1.cache_pb2 import AddWorkerOp, CacheServiceLinkResponse, WorkerMatch
from paceline.v1.common_pb2 import FinishReason
from paceline.v1.inference_pb2 import Ending, SchedulerStatus, SessionOpened, SessionRequest, Submission
from paceline.v1.worker_pb2 import (
    StepResult,
    WorkerRegistered,
    WorkerRegistration,
    WorkerReleased,
    WorkerServiceLinkResponse,
)
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.cache_link import CacheLink, Sent, admit_result
from scheduler_svc.core.intake import (
    CODE_DEADLINE_EXCEEDED,
    CODE_FAILED_PRECONDITION,
    CODE_INTERNAL,
    Limits,
    Rejection,
    check_limits,
    check_queue,
    check_registration,
    check_submission,
    invalid,
    new_request,
    recheck,
    rejected,
)
from scheduler_svc.core.journal import Journal
from scheduler_svc.core.placement import best_place
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.policy import OrderPolicy, Policies
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Phase, Request
from scheduler_svc.core.results import ResultReader, Tokens
from scheduler_svc.core.sessions import Session
from scheduler_svc.core.slots import Longs, SlotTable
from scheduler_svc.core.step import Step
from scheduler_svc.core.types import Counters, Outbox, SchedulerConfig
from scheduler_svc.core.worker import Draft, Worker

# Waiting requests whose matches are asked for anew, at the most.
MAX_HEADS = 16


class SchedulerCore:
    def __init__(
        self,
        config: SchedulerConfig,
        policies: Policies,
        fallback: Callable[[], Policies],
        epoch: int,
        on_policy_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`fallback` makes the policies that compose a step when those in force fail at it."""
        self.config = config
        self.policies = policies
        self.epoch = epoch
        self.counters = Counters()
        self.journal = Journal()
        self.budgets = Budgets(config)
        self.now_s = 0.0
        self._make_fallback, self._fallback = fallback, fallback()
        self._on_policy_error = on_policy_error
        self.queue = WaitingQueue(policies.order, self._order_failed)
        self.workers: dict[int, Worker] = {}
        self.limits: Limits | None = None  # of the last workers seen, so that intake can check while none is attached
        self._cache = CacheLink(epoch)
        self.sessions: dict[str, Session] = {}
        self._session_at: dict[int, Session] = {}
        self._outbox = Outbox()
        self._next_worker = self._next_session = self._next_seniority = self._next_sequence = 1
        self._front = 0  # places before all others are below 0
        self._matched: dict[int, Request] = {}  # by sequence: what the cache was asked to match
        self._planner = Planner(self._preempt, self.budgets.exceeded, self._session_index, config.max_num_seqs)
        self._results = ResultReader(self._cache, self._publish, self._end, self._fail_row)
        self._told: bytes = b""
        self._deadlines: SortedDict[tuple[float, int], Request] = SortedDict()
        self._refusals = 0  # of an idle system, in a row

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_session(self, session_id: str, window: int) -> None:
        """Raises Rejection if the id is taken or the window is 0."""
        if session_id in self.sessions:
            raise Rejection(
                CODE_FAILED_PRECONDITION, f"session_id: session {session_id!r} is open already", "session_id"
            )
        if window < 1:
            raise invalid("response_window", "must be at least 1")
        session = Session(session_id, self._next_session, window)
        self._next_session += 1
        session.opened = SessionOpened(epoch=self.epoch)
        session.status = self._status()
        self.sessions[session_id] = self._session_at[session.index] = session

    def close_session(self, session_id: str) -> None:
        """The gateway is gone: so are its requests."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for request in list(session.live.values()):
            self._end(request, FinishReason.FINISH_REASON_ABORT)
        del self._session_at[session.index]

    def session_message(self, session_id: str, message: SessionRequest, now_s: float) -> None:
        session = self.sessions[session_id]
        session.read = max(session.read, message.responses_read)
        for submission in message.submissions:
            try:
                self._submit(session, submission, now_s)
            except Rejection as rejection:
                self.counters.rejected += 1
                session.add_ending(rejected(submission.handle, rejection))
        for handle in message.cancels:
            request = session.live.get(handle)
            if request is not None:
                self._end(request, FinishReason.FINISH_REASON_ABORT)

    def _submit(self, session: Session, submission: Submission, now_s: float) -> None:
        check_submission(submission)
        if self.limits:
            check_limits(submission, self.limits)
        if submission.handle in session.live:
            raise Rejection(CODE_FAILED_PRECONDITION, f"handle: {submission.handle} is in use", "handle")
        request = new_request(session.id, self._next_seniority, submission, now_s)
        if not submission.accepted_before:  # nothing accepted is lost
            check_queue(self.queue, request, self.config, self.budgets)
        self._next_seniority += 1
        self.counters.accepted += 1
        session.live[request.handle] = request
        self.journal.arrived(request, now_s)
        if request.deadline_s < math.inf:
            self._deadlines[request.deadline_s, request.seniority] = request
        if request.num_tokens >= request.max_total_tokens:  # resubmitted when only its ending was missing
            self._end(request, FinishReason.FINISH_REASON_LENGTH)
        else:
            self._enqueue(request)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def register_worker(self, registration: WorkerRegistration, now_s: float) -> int:
        """Attach a worker; returns its id. Raises Rejection if it does not fit those attached."""
        others = [worker.registration for worker in self.workers.values()]
        live = any(session.live for session in self.sessions.values())
        check_registration(registration, others, self.limits if live else None)
        worker = Worker(
            id=self._next_worker,
            registration=registration,
            window=self.config.window,
            slots=SlotTable(min(registration.max_num_seqs, registration.max_batched_tokens), registration.block_size),
            last_heard_s=now_s,
            available_blocks=0,  # until the cache has answered
            prefix_caching=self.config.prefix_caching,
        )
        self._next_worker += 1
        self.workers[worker.id] = worker
        registered = WorkerRegistered(worker=worker.id, epoch=self.epoch, window=worker.window)
        self._outbox.to_workers.append((worker.id, WorkerServiceLinkResponse(registered=registered)))
        if self._cache.connected:
            self._cache.added.append(self._add_worker_op(worker))
        self._workers_changed()
        return worker.id

    def worker_result(self, worker_id: int, result: StepResult, now_s: float) -> None:
        """Raises ProtocolError; then the worker's link is to be closed."""
        worker = self.workers[worker_id]
        worker.last_heard_s = now_s
        self.counters.tokens += self._results.apply(worker, result)

    def worker_heartbeat(self, worker_id: int, now_s: float) -> None:
        self.workers[worker_id].last_heard_s = now_s

    def worker_drain(self, worker_id: int) -> None:
        self.workers[worker_id].draining = True
        self._workers_changed()

    def worker_lost(self, worker_id: int) -> None:
        """Its link is gone: what it ran goes back to the queue with the tokens it has."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        if self._cache.connected:
            self._cache.forget_worker(worker_id)
        for request in self._evacuate(worker):
            # Its sequence goes with the worker, unless the exchange that binds it is on its way.
            request.num_worker_losses += 1
            if request.num_worker_losses > self.config.max_worker_losses:
                message = f"worker: lost {request.num_worker_losses} times while it ran this request"
                self._end(request, FinishReason.FINISH_REASON_ERROR, Rejection(CODE_INTERNAL, message))
            else:
                self._enqueue(request)
        self._workers_changed()

    def _evacuate(self, worker: Worker) -> list[Request]:
        """Take every live request off the worker, with all its known tokens. Their sequences are dropped."""
        requests: list[Request] = []
        if worker.draft:
            bound = [admission.request for admission in worker.draft.decision.admissions]
            requests = [request for request in bound if request.phase is not Phase.ENDED]
            worker.draft.orphans = [
                (request.sequence, i) for i, request in enumerate(bound) if request.phase is not Phase.ENDED
            ]
            worker.draft, worker.binding_tokens = None, 0
        for slot in list(worker.running):
            self._recall_tokens(worker, slot)
            requests.append(worker.vacate(slot))
        for request in requests:
            self._unbind(request)
            request.phase, request.sequence = Phase.WAITING, 0
            self.counters.requeued += 1
            self.journal.event(request, "requeued", "its worker or the cache was lost", self.now_s)
        return sorted(requests, key=lambda request: request.seniority)

    def _workers_changed(self) -> None:
        if self.workers:
            first = next(iter(self.workers.values())).registration
            pool = max(worker.num_blocks * worker.block_size for worker in self.workers.values())
            fresh = self.limits is None or self.limits.model.fingerprint != first.model.fingerprint
            self.limits = Limits(first.model, pool, max(w.registration.max_loras for w in self.workers.values()))
            if fresh:
                for request in list(self.queue):  # accepted before anybody knew the model
                    if (rejection := recheck(request, self.limits)) is not None:
                        self._end(request, FinishReason.FINISH_REASON_ERROR, rejection)
        self._announce()

    def _announce(self) -> None:
        """Tell the sessions, if what they know of us has changed."""
        status = self._status()
        told = status.SerializeToString(deterministic=True)
        if told != self._told:
            self._told = told
            for session in self.sessions.values():
                session.status = status

    def _status(self) -> SchedulerStatus:
        active = [worker for worker in self.workers.values() if not worker.draining]
        room = len(self.queue) < self.config.max_queued_requests
        model = None
        if self.limits:
            model = type(self.limits.model)()
            model.CopyFrom(self.limits.model)
            model.max_model_len = self.limits.max_total_tokens
        return SchedulerStatus(
            num_workers=len(active), ready=bool(active) and self._cache.connected and room, model=model
        )

    # ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────

    def cache_connected(self, epoch: int) -> None:
        """A new link: the cache knows nothing, so everything is added again."""
        self._cache.forget()
        self._cache.epoch, self._cache.connected = epoch, True
        self._cache.added.extend(self._add_worker_op(worker) for worker in self.workers.values())
        for request in self.queue:
            self._ask_match(request)
        self._workers_changed()

    def cache_lost(self) -> None:
        """Block tables are gone: what runs goes back to the queue and is recomputed."""
        self._cache.forget()
        for request in self.queue:
            request.sequence, request.matches = 0, None
        for worker in self.workers.values():
            worker.available_blocks = 0
            worker.knows_cache = False
            for request in self._evacuate(worker):
                self._enqueue(request)
        self._workers_changed()

    def cache_response(self, response: CacheServiceLinkResponse) -> None:
        """Raises ProtocolError; then the cache's link is to be closed."""
        sent = self._cache.receive(response)
        for counters in response.pools:
            if (worker := self.workers.get(counters.worker)) is not None:
                worker.available_blocks = counters.free_blocks + counters.cached_blocks
        for index, request, sequence in sent.matches:
            if request.sequence == sequence and response.results[index].HasField("match"):
                self._set_matches(request, response.results[index].match.matches)
        for update in response.match_updates:
            if (waiting := self._matched.get(update.sequence)) is not None and waiting.phase is Phase.WAITING:
                self._set_matches(waiting, update.matches)
        for worker in sent.askers:
            worker.knows_cache = True
        self._finish_drafts(sent, response)

    def _set_matches(self, request: Request, matches: Iterable[WorkerMatch]) -> None:
        request.matches = {match.worker: match for match in matches}
        if request.phase is Phase.WAITING:
            self.queue.rematched(request)

    def _finish_drafts(self, sent: Sent, response: CacheServiceLinkResponse) -> None:
        for draft, extend, admits in sent.drafts:
            worker = self.workers.get(draft.worker)
            if worker is not None and worker.draft is draft:
                worker.draft = None
                self._finish_draft(worker, draft, response, extend, admits)
            else:  # lost meanwhile: RemoveWorker follows and forgets what was admitted there, but not what was refused
                refused = [seq for seq, i in draft.orphans if admit_result(response, admits[i]) is None]
                self._cache.frees.extend(refused)

    def _finish_draft(
        self,
        worker: Worker,
        draft: Draft,
        response: CacheServiceLinkResponse | None,
        extend: int = -1,
        admits: Iterable[int] = (),
    ) -> None:
        if extend >= 0 and response is not None and not response.results[extend].HasField("extend"):
            self._undo_draft(draft)
            return
        plan = self._planner.finish_step(worker, draft, response, extend, list(admits))
        if plan is not None:
            self.counters.steps += 1
            self._outbox.to_workers.append((worker.id, WorkerServiceLinkResponse(plan=plan)))
        for admission in draft.decision.admissions:
            request = admission.request
            if request.phase is Phase.BINDING:  # the cache had less room than was thought
                self._unbind(request)
                request.phase, request.worker = Phase.WAITING, 0
                self.queue.add(request)

    def _undo_draft(self, draft: Draft) -> None:
        """The running sequences could not grow after all, so this step is not made; the next draft makes room.

        It happens when a commit of the same exchange found its block stored already: it then holds that one too, which
        takes an evictable block out of what was counted as available.
        """
        self.workers[draft.worker].binding_tokens = 0
        for admission in draft.decision.admissions:
            request = admission.request
            if request.phase is Phase.BINDING:
                self._unbind(request)
                self._forget_sequence(request)
                self._enqueue(request)

    def _add_worker_op(self, worker: Worker) -> AddWorkerOp:
        return AddWorkerOp(
            worker=worker.id,
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
            prefix_caching=self.config.prefix_caching,
        )

    def _ask_match(self, request: Request) -> None:
        request.sequence, request.matches = self._next_sequence, None
        self._next_sequence += 1
        self._cache.matches[request.sequence] = self._matched[request.sequence] = request

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, request: Request) -> None:
        request.phase, request.worker, request.slot = Phase.WAITING, 0, -1
        self.queue.add(request)
        if self._cache.connected:
            self._ask_match(request)

    def _recall_tokens(self, worker: Worker, slot: int) -> None:
        """Complete the request's own record with what still stands in the slot's tail."""
        worker.running[slot].output += worker.slots.take_tail(slot)

    def _preempt(self, request: Request) -> None:
        worker = self.workers[request.worker]
        self._recall_tokens(worker, request.slot)
        worker.vacate(request.slot)
        self._unbind(request)
        self._forget_sequence(request)
        request.num_preemptions += 1
        self.counters.preempted += 1
        match self.policies.preemption.requeue:
            case "front":
                self._front -= 1
                request.place = self._front
            case "back":
                self._next_seniority += 1  # ranks are drawn from the same numbers as arrivals
                request.place = self._next_seniority
        self.journal.event(request, "preempted", "gave its blocks to what runs", self.now_s)
        self._enqueue(request)

    def _bind(self, worker: Worker, request: Request) -> None:
        self.queue.remove(request)
        self.queue.started(request)
        self.budgets.bind(request)
        request.phase, request.worker = Phase.BINDING, worker.id
        if request.started_s is None:
            request.started_s = self.now_s
        self.journal.event(request, "running", f"on worker {worker.id}", self.now_s)

    def _unbind(self, request: Request) -> None:
        """It neither runs nor is about to; what becomes of it is the caller's business."""
        self.budgets.unbind(request)
        self.queue.stopped(request)

    def _forget_sequence(self, request: Request) -> None:
        if request.sequence and self._cache.connected:
            self._cache.forget_sequence(request.sequence)
        self._matched.pop(request.sequence, None)
        request.sequence = 0

    def _fail_row(self, request: Request, message: str) -> None:
        self._end(request, FinishReason.FINISH_REASON_ERROR, Rejection(CODE_INTERNAL, message))

    def _end(self, request: Request, reason: FinishReason.ValueType, error: Rejection | None = None) -> None:
        """The request is over, wherever it stands; its session is told."""
        if request.phase is Phase.RUNNING:
            self.workers[request.worker].vacate(request.slot)
        elif request.phase is Phase.WAITING and request in self.queue:
            self.queue.remove(request)
        if request.phase in (Phase.RUNNING, Phase.BINDING):
            self._unbind(request)
        self._forget_sequence(request)
        self._deadlines.pop((request.deadline_s, request.seniority), None)
        request.phase = Phase.ENDED
        name = FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        self.counters.finished[name] = self.counters.finished.get(name, 0) + 1
        self.journal.event(request, "ended", name if error is None else error.message, self.now_s)
        session = self.sessions.get(request.session_id)
        if session is not None and session.live.pop(request.handle, None) is not None:
            ending = rejected(request.handle, error) if error else Ending(handle=request.handle, reason=reason)
            ending.cached_tokens = request.cached_tokens or 0
            session.add_ending(ending)

    def _publish(self, session: int, sessions: Longs, handles: Longs, tokens: Tokens) -> None:
        if session >= 0:
            self._session_at[session].add_tokens(handles, tokens)
            return
        for index in np.unique(sessions).tolist():
            mine = sessions == index
            self._session_at[index].add_tokens(handles[mine], tokens[mine])

    def _session_index(self, request: Request) -> int:
        return self.sessions[request.session_id].index

    # ── time and output ──────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_s: float) -> None:
        """To be called a few times a second."""
        self.now_s = now_s
        self.budgets.measure(now_s)
        for worker in list(self.workers.values()):
            silent_s = now_s - worker.last_heard_s
            if silent_s > self.config.worker_timeout_s:
                self._outbox.lost_workers.append((worker.id, f"nothing heard for {silent_s:.1f} s"))
                self.worker_lost(worker.id)
        self._end_late(now_s)
        self._announce()

    def _end_late(self, now_s: float) -> None:
        late: list[tuple[Request, str]] = []
        for (deadline_s, _), request in self._deadlines.items():
            if deadline_s > now_s:
                break
            late.append((request, f"deadline_s: {deadline_s - request.arrival_s:g} s are over"))
        if (limit_s := self.config.waiting_timeout_s) > 0:
            oldest = itertools.takewhile(lambda request: now_s - request.arrival_s > limit_s, self.queue)
            late += [(r, f"queue: waited for more than {limit_s:g} s") for r in oldest if r.started_s is None]
        if (limit_s := self.config.running_timeout_s) > 0:
            running = (request for worker in self.workers.values() for request in worker.running.values())
            late += [(r, f"request: ran for more than {limit_s:g} s") for r in running if r.ran_s(now_s) > limit_s]
        for request, message in late:
            if request.phase is not Phase.ENDED:
                self._end(request, FinishReason.FINISH_REASON_ERROR, Rejection(CODE_DEADLINE_EXCEEDED, message))

    def poll(self, now_s: float) -> Outbox:
        """Everything there is to send, after planning whatever can be planned."""
        self.now_s = now_s
        self._plan(now_s)
        for session in self.sessions.values():
            if (message := session.next_message()) is not None:
                self._outbox.to_sessions.append((session.id, message))
        self._release_drained()
        outbox, self._outbox = self._outbox, Outbox()
        return outbox

    def _plan(self, now_s: float) -> None:
        """Compose a step for every worker with credit; those that need nothing of the cache are plans at once."""
        if not self._cache.connected:
            return
        drafts: list[tuple[Worker, Draft]] = []
        askers: list[Worker] = []
        for worker in self.workers.values():
            while worker.draft is None and worker.has_credit:
                if self._must_ask(worker):
                    askers.append(worker)
                    break
                step = self._compose(worker, now_s)
                if step is None:
                    askers.append(worker)  # somebody gave way
                    break
                if not self._accept(worker, step, drafts):
                    break
        if self._cache.idle:
            heads = self._heads() if askers or drafts else []
            if (message := self._cache.compose(drafts, askers, heads)) is not None:
                self._outbox.to_cache.append(message)

    def _must_ask(self, worker: Worker) -> bool:
        """Whether the next step has to wait for the cache. Decisions about who runs are made on what is there, so the
        cache first answers for all that has happened; a step in which everything just goes on needs no answer."""
        room = worker.slots.num_free > 0 or self.policies.capacity.preempts_for_waiting
        may_admit = len(self.queue) > 0 and room and not worker.draining
        if not (may_admit or worker.preempted or worker.prefills or worker.held or worker.may_grow):
            return False
        if not self._cache.idle:
            return True
        return (may_admit or bool(worker.preempted)) and self._cache.has_gathered and not worker.knows_cache

    def _compose(self, worker: Worker, now_s: float) -> Step | None:
        try:
            return self._planner.draft_step(worker, self.policies, self._waiting(worker, now_s), now_s)
        except Exception as error:  # a policy is a guest: what it raises costs its turn, and no request
            self.counters.policy_errors += 1
            self._on_policy_error(error)
        return self._planner.draft_step(worker, self._fallback, self._waiting(worker, None), now_s)

    def _accept(self, worker: Worker, step: Step, drafts: list[tuple[Worker, Draft]]) -> bool:
        """Turn a composed step into a plan, or into a draft that waits for the cache; False if it was empty."""
        worker.knows_cache = False
        preempted = bool(worker.preempted)
        worker.preempted.clear()
        for policy in (self.policies.capacity, self.policies.batch):
            try:
                policy.planned(step)
            except Exception as error:
                self.counters.policy_errors += 1
                self._on_policy_error(error)
        self.journal.decided(step.held_back, self.now_s)
        if step.is_empty:
            self.counters.barren_steps += preempted
            self._watch_progress(step)
            return preempted  # what gave way may be all that there is to run
        self._refusals = 0
        draft = Draft(worker.id, step.decision(), worker.slots.num_releases)
        if len(draft.decision.growth) or draft.decision.admissions:
            for admission in draft.decision.admissions:
                self._bind(worker, admission.request)
            worker.draft = draft
            drafts.append((worker, draft))
        else:
            self._finish_draft(worker, draft, None)
        return True

    def _watch_progress(self, step: Step) -> None:
        """Nothing runs anywhere, and still the policies let nobody in: after a while the first one is failed, so that
        it does not block the others for ever."""
        idle = not any(w.running or w.in_flight or w.draft for w in self.workers.values())
        if not (idle and step.held_back and len(self.queue)):
            return
        self._refusals += 1
        if self._refusals >= self.config.stuck_decisions * len(self.workers):
            self._refusals = 0
            request, reason, detail = step.held_back[0]
            message = f"{reason}: no progress is possible for this request under the policies in force: {detail}"
            self._end(request, FinishReason.FINISH_REASON_ERROR, Rejection(CODE_FAILED_PRECONDITION, message))

    def _waiting(self, worker: Worker, ordered_at_s: float | None) -> Callable[[], Iterator[Request]]:
        """What may be bound to the worker, in the order in force at that time, or (None) oldest first."""

        def waiting() -> Iterator[Request]:
            if worker.draining:
                return
            queue = self.queue
            for request in iter(queue) if ordered_at_s is None else queue.order.ordered(ordered_at_s):
                fits = request.matches is not None and worker.can_ever_hold(request)
                if fits and best_place(request, self.workers.values()) in (worker, None):
                    yield request

        return waiting

    def _heads(self) -> list[Request]:
        """The requests that the next composition looks at first."""
        seats = sum(worker.slots.num_free for worker in self.workers.values())
        count = MAX_HEADS if self.policies.capacity.preempts_for_waiting else min(seats, MAX_HEADS)
        if not count:
            return []
        try:
            return list(itertools.islice(self.queue.order.ordered(self.now_s), count))
        except Exception as error:
            self.queue.reorder(self._order_failed(error))
            return []

    def set_policies(self, policies: Policies) -> None:
        """Other policies from the next step on. Raises what their order raises; then nothing has changed."""
        self.queue.reorder(policies.order)
        for worker in self.workers.values():
            for request in worker.running.values():
                self.queue.started(request)
        self.policies = policies

    def _order_failed(self, error: Exception) -> OrderPolicy:
        """The order policy can no longer be trusted to know what waits: the default one takes its place."""
        self.counters.policy_errors += 1
        self._on_policy_error(error)
        order = self._make_fallback().order
        self.policies = dataclasses.replace(self.policies, order=order)
        return order

    def _release_drained(self) -> None:
        for worker in self.workers.values():
            if worker.draining and not (worker.released or worker.running or worker.draft or worker.in_flight):
                worker.released = True
                self._outbox.to_workers.append((worker.id, WorkerServiceLinkResponse(released=WorkerReleased())))
