"""The scheduler's state machine: events in, messages out.

Every public method is an event (a message, a connection that came or went, the passing of time). None of them does I/O;
what is to be sent gathers until `poll` hands it over. Same events, same messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.v1.cache_pb2 import AddWorkerOp, CacheServiceLinkResponse
from paceline.v1.common_pb2 import FinishReason
from paceline.v1.inference_pb2 import Ending, SchedulerStatus, SessionOpened, SessionRequest, Submission
from paceline.v1.worker_pb2 import (
    StepResult,
    WorkerRegistered,
    WorkerRegistration,
    WorkerReleased,
    WorkerServiceLinkResponse,
)
from scheduler_svc.core.cache_link import CacheLink, Sent, admit_result
from scheduler_svc.core.intake import (
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
from scheduler_svc.core.placement import best_place
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.policy import Policies
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Phase, Request
from scheduler_svc.core.results import ResultReader, Tokens
from scheduler_svc.core.sessions import Session
from scheduler_svc.core.slots import Slots, SlotTable
from scheduler_svc.core.types import Counters, Outbox, SchedulerConfig
from scheduler_svc.core.worker import Draft, Worker


class SchedulerCore:
    def __init__(self, config: SchedulerConfig, policies: Policies, epoch: int) -> None:
        self.config = config
        self.policies = policies
        self.epoch = epoch
        self.counters = Counters()
        self.queue = WaitingQueue()
        self.workers: dict[int, Worker] = {}
        self.limits: Limits | None = None  # of the last workers seen, so that intake can check while none is attached
        self._cache = CacheLink(epoch)
        self._sessions: dict[str, Session] = {}
        self._session_at: dict[int, Session] = {}
        self._outbox = Outbox()
        self._next_worker = self._next_session = self._next_seniority = self._next_sequence = 1
        self._planner = Planner(policies, self._is_best_place, self._preempt, self._session_index)
        self._results = ResultReader(self._cache, self._publish, self._end, self._fail_row)
        self._told: bytes = b""

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_session(self, session_id: str, window: int) -> None:
        """Raises Rejection if the id is taken or the window is 0."""
        if session_id in self._sessions:
            raise Rejection(
                CODE_FAILED_PRECONDITION, f"session_id: session {session_id!r} is open already", "session_id"
            )
        if window < 1:
            raise invalid("response_window", "must be at least 1")
        session = Session(session_id, self._next_session, window)
        self._next_session += 1
        session.opened = SessionOpened(epoch=self.epoch)
        session.status = self._status()
        self._sessions[session_id] = self._session_at[session.index] = session

    def close_session(self, session_id: str) -> None:
        """The gateway is gone: so are its requests."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for request in list(session.live.values()):
            self._end(request, FinishReason.FINISH_REASON_ABORT)
        del self._session_at[session.index]

    def session_message(self, session_id: str, message: SessionRequest, now_s: float) -> None:
        session = self._sessions[session_id]
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
            check_queue(self.queue, request, self.config)
        self._next_seniority += 1
        self.counters.accepted += 1
        session.live[request.handle] = request
        if request.num_tokens >= request.max_total_tokens:  # resubmitted when only its ending was missing
            self._end(request, FinishReason.FINISH_REASON_LENGTH)
        else:
            self._enqueue(request)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def register_worker(self, registration: WorkerRegistration, now_s: float) -> int:
        """Attach a worker; returns its id. Raises Rejection if it does not fit those attached."""
        others = [worker.registration for worker in self.workers.values()]
        live = any(session.live for session in self._sessions.values())
        check_registration(registration, others, self.limits if live else None)
        worker = Worker(
            id=self._next_worker,
            registration=registration,
            window=self.config.window,
            slots=SlotTable(min(registration.max_num_seqs, registration.max_batched_tokens), registration.block_size),
            last_heard_s=now_s,
            available_blocks=0,  # until the cache has answered
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
            requests = [request for request in worker.draft.admissions if request.phase is not Phase.ENDED]
            worker.draft.orphans = [
                (request.sequence, i)
                for i, request in enumerate(worker.draft.admissions)
                if request.phase is not Phase.ENDED
            ]
            worker.draft, worker.binding_tokens = None, 0
        for slot in list(worker.running):
            self._recall_tokens(worker, slot)
            requests.append(worker.vacate(slot))
        for request in requests:
            request.phase, request.sequence = Phase.WAITING, 0
            self.counters.requeued += 1
        return sorted(requests, key=lambda request: request.seniority)

    def _workers_changed(self) -> None:
        if self.workers:
            first = next(iter(self.workers.values())).registration
            pool = max(worker.num_blocks * worker.block_size for worker in self.workers.values())
            fresh = self.limits is None or self.limits.model.fingerprint != first.model.fingerprint
            self.limits = Limits(first.model, pool)
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
            for session in self._sessions.values():
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
                request.matches = {match.worker: match for match in response.results[index].match.matches}
        self._finish_drafts(sent, response)

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
        for request in draft.admissions:
            if request.phase is Phase.BINDING:  # the cache had less room than was thought
                request.phase, request.worker = Phase.WAITING, 0
                request.matches = {}
                self.queue.add(request)

    def _undo_draft(self, draft: Draft) -> None:
        """The running sequences could not grow after all, so this step is not made; the next draft makes room.

        It happens when a commit of the same exchange found its block stored already: it then holds that one too, which
        takes an evictable block out of what was counted as available.
        """
        self.workers[draft.worker].binding_tokens = 0
        for request in draft.admissions:
            if request.phase is Phase.BINDING:
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
        self._cache.matches[request.sequence] = request

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
        self._forget_sequence(request)
        request.num_preemptions += 1
        self.counters.preempted += 1
        self._enqueue(request)

    def _forget_sequence(self, request: Request) -> None:
        if request.sequence and self._cache.connected:
            self._cache.forget_sequence(request.sequence)
        request.sequence = 0

    def _fail_row(self, request: Request, message: str) -> None:
        self._end(request, FinishReason.FINISH_REASON_ERROR, Rejection(CODE_INTERNAL, message))

    def _end(self, request: Request, reason: FinishReason.ValueType, error: Rejection | None = None) -> None:
        """The request is over, wherever it stands; its session is told."""
        if request.phase is Phase.RUNNING:
            self.workers[request.worker].vacate(request.slot)
        elif request.phase is Phase.WAITING and request in self.queue:
            self.queue.remove(request)
        self._forget_sequence(request)
        request.phase = Phase.ENDED
        name = FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        self.counters.finished[name] = self.counters.finished.get(name, 0) + 1
        session = self._sessions.get(request.session_id)
        if session is not None and session.live.pop(request.handle, None) is not None:
            ending = rejected(request.handle, error) if error else Ending(handle=request.handle, reason=reason)
            ending.cached_tokens = request.cached_tokens or 0
            session.add_ending(ending)

    def _publish(self, worker: Worker, rows: Slots, tokens: Tokens) -> None:
        indexes = worker.slots.session[rows]
        handles = worker.slots.handle[rows]
        first = int(indexes[0])
        if (indexes == first).all():
            self._session_at[first].add_tokens(handles, tokens)
            return
        for index in np.unique(indexes).tolist():
            mine = indexes == index
            self._session_at[index].add_tokens(handles[mine], tokens[mine])

    def _session_index(self, request: Request) -> int:
        return self._sessions[request.session_id].index

    # ── time and output ──────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_s: float) -> None:
        """To be called a few times a second."""
        for worker in list(self.workers.values()):
            silent_s = now_s - worker.last_heard_s
            if silent_s > self.config.worker_timeout_s:
                self._outbox.lost_workers.append((worker.id, f"nothing heard for {silent_s:.1f} s"))
                self.worker_lost(worker.id)
        self._announce()

    def poll(self, now_s: float) -> Outbox:
        """Everything there is to send, after planning whatever can be planned."""
        self._plan(now_s)
        for session in self._sessions.values():
            if (message := session.next_message()) is not None:
                self._outbox.to_sessions.append((session.id, message))
        self._release_drained()
        outbox, self._outbox = self._outbox, Outbox()
        return outbox

    def _plan(self, now_s: float) -> None:
        """Draft a step for every worker with credit; those that need nothing of the cache are plans at once."""
        drafts: list[tuple[Worker, Draft]] = []
        if self._cache.connected:
            for worker in self.workers.values():
                while worker.draft is None and worker.has_credit:
                    draft = self._draft(worker, now_s)
                    if draft is None:
                        break
                    if draft.growth or draft.admissions:
                        worker.draft = draft
                        drafts.append((worker, draft))
                    else:
                        self._finish_draft(worker, draft, None)
        if self._cache.idle and (message := self._cache.compose(drafts)) is not None:
            self._outbox.to_cache.append(message)

    def _draft(self, worker: Worker, now_s: float) -> Draft | None:
        """None also while a draft would need the cache, and the cache is busy with the exchange before."""
        if not self._cache.idle and (worker.growing_slots() or (self.queue and worker.slots.num_free)):
            return None
        waiting = self.policies.order.order(self.queue, now_s) if self.queue else ()
        draft = self._planner.draft_step(worker, waiting)
        for request in draft.admissions if draft else ():
            self.queue.remove(request)
            request.phase, request.worker = Phase.BINDING, worker.id
        return draft

    def _is_best_place(self, request: Request, worker: Worker) -> bool:
        if len(self.workers) > 1 and request.matches is None:
            return False  # the cache's answer is on its way
        return best_place(request, self.workers.values()) in (worker, None)

    def _release_drained(self) -> None:
        for worker in self.workers.values():
            if worker.draining and not (worker.released or worker.running or worker.draft or worker.in_flight):
                worker.released = True
                self._outbox.to_workers.append((worker.id, WorkerServiceLinkResponse(released=WorkerReleased())))
