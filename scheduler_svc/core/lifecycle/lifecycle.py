"""A request's way from acceptance to its end: queued, bound to a worker, preempted, requeued, ended.

Every change of a request's phase is in this module, except GRANT, which the Emitter makes. So everything that counts
requests (queue, budgets, deadlines, the cache's names, the timeline) changes together with the phase.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from paceline.v1.common_pb2 import FinishReason
from scheduler_svc.core.admission.budgets import ClassBudgets
from scheduler_svc.core.admission.queue import ClassQueues
from scheduler_svc.core.admission.validation import explain_rejection
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.cache.swapping import Swaps
from scheduler_svc.core.lifecycle.conversations import Conversations
from scheduler_svc.core.lifecycle.holdings import Holdings
from scheduler_svc.core.lifecycle.timeouts import Timeouts
from scheduler_svc.core.output.sessions import Session
from scheduler_svc.core.output.timeline import BEAMS, RequestTimeline
from scheduler_svc.core.output.trace_phases import EndedRequests
from scheduler_svc.core.rejection import CODE_INTERNAL, Rejection
from scheduler_svc.core.requests.phases import Event, Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig, SchedulerCounters
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.step_time import OutputLength


class Lifecycle:
    """Applies the events of phases.py to requests. Updates the queue, budgets, counters, timeline and holdings with
    each event."""

    def __init__(
        self,
        config: SchedulerConfig,
        queue: ClassQueues,
        budgets: ClassBudgets,
        cache: CacheLink,
        workers: dict[int, WorkerState],
        sessions: dict[str, Session],
        counters: SchedulerCounters,
        output_length: OutputLength,  # learns from requests that end
    ) -> None:
        self.config = config
        self.queue = queue
        self.budgets = budgets
        self.counters = counters
        self.timeline = RequestTimeline(config.tenant_max_running_tokens)
        self.traces: EndedRequests | None = None  # None: no request is traced
        self.swaps = Swaps(cache, workers, counters)
        self.holdings = Holdings(queue, budgets, cache, workers, self.swaps, config.partial_reuse)
        self.conversations = Conversations(cache, config.conversation_ttl_s)
        self.now_s = 0.0
        self.timeouts = Timeouts(config, queue, workers)
        self._output_length = output_length
        self._cache = cache
        self._workers = workers
        self._sessions = sessions
        self.arrival_indexes = itertools.count(1)  # arrival indexes and queue positions
        self._front_positions = itertools.count(-1, -1)  # queue positions before all others

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(self, session: Session, request: Request, enqueue: bool = True) -> None:
        self.counters.accepted += 1
        session.live[request.handle] = request
        self.timeline.arrived(request, request.arrival_s)
        self.timeouts.add(request)
        if not enqueue:
            return
        if request.num_tokens >= request.max_total_tokens:  # resubmitted when only its ending was missing
            self.end(request, FinishReason.FINISH_REASON_LENGTH)
        else:
            self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Into the queue, in phase WAITING."""
        self.queue.of(request).add(request)
        if self._cache.connected:
            self.holdings.ask_match(request)

    def ask_all_matches(self) -> None:
        """Give the waiting requests, except swapped-out ones, new names at the cache, which may know them under old
        ones."""
        for request in self.queue:
            if not request.held.swapped_on:
                self.holdings.release(request)
                self.holdings.ask_match(request)

    def recompute(self, requests: Iterable[Request], why: str = "lost its blocks in host memory") -> None:
        """These requests wait, and give up their KV in host memory: they compute their tokens again."""
        for request in list(requests):
            self.holdings.release(request)
            self.note(request, "requeued", why)
            if self._cache.connected:
                self.holdings.ask_match(request)

    # ── bound and running ────────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, worker: WorkerState, request: Request, why: str = "") -> None:
        """`why`: the reason for this worker, for `paceline explain`."""
        self.holdings.bind(worker, request)
        request.advance(Event.SCHEDULE)
        request.history.has_run = True
        if request.history.started_s is None:
            request.history.started_s = self.now_s
        if request.is_member:
            if request.root.history.started_s is None:
                self.timeline.event(request.root, "running", BEAMS, self.now_s)
            request.root.history.started_s = request.history.started_s
        apart = ", separately" if request.is_suspect else ""
        self.note(request, "running", f"on worker {worker.id}{apart}{why and f': {why}'}")

    def refused(self, request: Request) -> None:
        """The cache had less room than the step assumed. The request waits again, and the cache still knows it."""
        if not request.held.swapped_on:
            # The match was larger than what the cache had. The request is scheduled again after a new match.
            request.matches = None
            self._cache.rematches[request.held.sequence] = None
        self.requeue_unchanged(request)

    def requeue_unchanged(self, request: Request) -> None:
        """The request that was about to get a slot waits again. It keeps its KV in host memory if it can resume."""
        self.holdings.release(request, keeps_sequence=True)
        request.advance(Event.REJECT)
        self.queue.of(request).add(request)
        if request.held.swapped_on:
            if self._workers[request.held.swapped_on].draining:
                self.recompute([request])
            else:
                self.swaps.refused(request)

    def unanswered(self, request: Request) -> None:
        """The cache was lost before it answered for this request."""
        self.requeue_unchanged(request)
        self.note(request, "waiting", "the cache was lost before it answered")

    def requeue(self, request: Request, event: Event = Event.REJECT) -> None:
        """Requeue a request under a new sequence name. The cache has granted blocks for it, or may have."""
        self.holdings.release(request)
        request.advance(event)
        self.enqueue(request)

    def preempt(self, request: Request, requeue: str, mode: str, why: str) -> None:
        """The request waits again, with all its known tokens. `requeue` and `mode` as in PreemptionPolicy."""
        worker, swaps = self._workers[request.held.worker], self.swaps.suits(request, mode)
        request.history.num_preemptions += 1
        self.counters.preempted += 1
        match requeue:
            case "front":
                request.queue_position = next(self._front_positions)
            case "back":
                request.queue_position = next(self.arrival_indexes)
        self.note(request, "preempted", "moves to host memory" if swaps else why)
        if not swaps:
            self.requeue(request, Event.PREEMPT)
            return
        self.holdings.release(request, keeps_sequence=True)
        request.advance(Event.PREEMPT)
        self.swaps.start(worker, request)
        self.queue.of(request).add(request)

    def park(self, request: Request) -> None:
        """A beam has run its one token. It leaves its slot and keeps its blocks for the beams that fork from it."""
        self.holdings.park(request)
        request.advance(Event.PARK)

    def unpark(self, request: Request) -> None:
        """Free a parked beam: no other beam forks from it any more, or its blocks are needed."""
        if request.phase is Phase.PARKED:
            self._take_out(request)

    def evacuate(self, worker: WorkerState, why: str, blamed: Collection[Request] = ()) -> list[Request]:
        """Take every live request off a lost worker, with all its known tokens. Their sequences are dropped. `why`: how
        the worker was lost. `blamed`: requests in the steps that `why` names."""
        for parked in list(worker.parked.values()):
            self._lose_blocks(worker, parked)
        requests = [*worker.drop_pending_step(), *worker.batch.running.values()]
        for request in requests:
            was_in_it = "; it was in that step and is retried separately" if request in blamed else ""
            self._lose_blocks(worker, request, why + was_in_it)
        return sorted(requests, key=lambda request: request.arrival_index)

    def restore_refused(self, request: Request, why: str) -> None:
        """A new cache refuses to give the request its blocks back: the request computes its tokens again."""
        why = f"the cache was lost, and its blocks with it: {why}"
        if request.phase is Phase.WAITING:  # it was swapped out
            self.recompute([request], why)
            return
        ran = request.phase is Phase.RUNNING
        self._lose_blocks(self._workers[request.held.worker], request, why)
        if ran:
            self.enqueue(request)

    def _lose_blocks(self, worker: WorkerState, request: Request, why: str = "") -> None:
        """The request's blocks on the worker are lost: with the worker, or because a new cache refuses them. A parked
        beam ends. The caller may enqueue any other request again."""
        self.holdings.release(request, lost=worker)
        request.advance(Event.LOSE)
        if request.phase is not Phase.ENDED:
            self.counters.requeued += 1
            request.history.num_losses += 1
            self.note(request, "requeued", why)

    # ── over ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def fail_poisoned(self, request: Request, why: str) -> None:
        """The request was the only row of `poison_failures` failed steps in a row: it is not retried."""
        self.counters.poisoned += 1
        times = self.config.poison_failures
        self.fail(request, f"request: was the only request in {times} failed steps in a row; the last time, {why}")

    def invalidate_kv(self, request: Request, message: str) -> None:
        """The worker could not compute the request. The cache keeps nothing of it, so no request reuses wrong KV."""
        request.kv_is_invalid = True
        self.fail(request, message)

    def fail(self, request: Request, message: str, code: int = CODE_INTERNAL) -> None:
        self.end(request, FinishReason.FINISH_REASON_ERROR, Rejection(code, message))

    def end(self, request: Request, reason: FinishReason.ValueType, error: Rejection | None = None) -> None:
        """End the request in any phase, and tell its session. A beam ends together with its search."""
        if (group := request.family.group) is not None:
            request = group.root
            parked = [
                one for worker in self._workers.values() for one in worker.parked.values() if one.family.group is group
            ]
            for member in [*group.members, *parked]:
                self._take_out(member)
        self._take_out(request)
        self.timeouts.remove(request)
        self.conversations.left(request, self.now_s)
        if (
            reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)
            and request.family.group is None
        ):
            self._output_length.add(request.num_output_tokens)
        name = FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        self.counters.finished[name] = self.counters.finished.get(name, 0) + 1
        events = self.timeline.ended(request, name if error is None else error.message, self.now_s)
        if self.traces is not None and request.trace is not None:
            self.traces.ended(request, events, name, error, self.now_s)
        session = self._sessions.get(request.session_id)
        if session is not None and session.live.pop(request.handle, None) is not None:
            ending = session.add_ending()
            ending.handle, ending.reason = request.handle, reason
            ending.timing.CopyFrom(request.history.timing(request.arrival_s, self.now_s))
            if error is not None:
                explain_rejection(ending, error)
            if request.history.cached_tokens:
                ending.cached_tokens = request.history.cached_tokens
            ending.hypotheses.extend(request.family.hypotheses)

    def _take_out(self, request: Request) -> None:
        """Take the request out of its phase, and free everything it holds."""
        if request.phase is Phase.ENDED:
            return
        if request.phase is Phase.WAITING and request in self.queue:
            self.queue.of(request).remove(request)
        self.holdings.release(request)
        request.advance(Event.END)
        # request and view refer to each other: without this its tokens would stay until a garbage collection
        request.view = None

    def note(self, request: Request, event: str, detail: str) -> None:
        """Add to the timeline, which knows only clients' requests, not members of a beam search."""
        if not request.is_member:
            self.timeline.event(request, event, detail, self.now_s)

    def end_late(self, now_s: float) -> None:
        """End the requests that have missed their deadline or one of the time-outs."""
        while late := [
            (request, why) for request, why in self.timeouts.late(now_s) if request.phase is not Phase.ENDED
        ]:
            for request, rejection in late:
                if request.phase is not Phase.ENDED:  # it may be late in two ways
                    self.end(request, FinishReason.FINISH_REASON_ERROR, rejection)
            if not self.budgets.online.limits_tenants:
                break  # with tenant limits, requests that the order now sees may be late too
