"""A request's way from acceptance to its end: queued, bound to a worker, preempted, requeued, ended.

Every change of a request's phase is in this module. So everything that counts requests (queue, budgets, deadlines, the
cache's names, the timeline) changes together with the phase.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator

from sortedcontainers import SortedDict

from paceline.v1.cache_pb2 import WorkerMatch
from paceline.v1.common_pb2 import FinishReason
from scheduler_svc.core.admission.budgets import Budgets
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.admission.validation import explain_rejection
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.cache.swapping import Swaps
from scheduler_svc.core.output.sessions import Session
from scheduler_svc.core.output.timeline import RequestTimeline
from scheduler_svc.core.rejection import CODE_DEADLINE_EXCEEDED, CODE_INTERNAL, CODE_UNAVAILABLE, Rejection
from scheduler_svc.core.requests.phases import Event, Phase
from scheduler_svc.core.requests.request import PrefixMatch, Request
from scheduler_svc.core.types import SchedulerConfig, SchedulerCounters
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.step_time import OutputLength

# Seconds after which a client should retry that was refused because no worker is attached: a worker takes seconds to
# load.
NO_WORKER_RETRY_S = 5.0
REASONS = {reason: name.removeprefix("FINISH_REASON_").lower() for name, reason in FinishReason.items()}


class Lifecycle:
    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        budgets: Budgets,
        cache: CacheLink,
        workers: dict[int, WorkerState],
        sessions: dict[str, Session],
        counters: SchedulerCounters,
        output_length: OutputLength,
    ) -> None:
        """`output_length` learns from requests that end."""
        self.config = config
        self.queue = queue
        self.budgets = budgets
        self.counters = counters
        self.timeline = RequestTimeline(config.tenant_max_running_tokens)
        self.swaps = Swaps(cache, workers, counters)
        self.now_s = 0.0
        # The first tick that found no worker attached. None while a worker is attached.
        self.no_worker_since_s: float | None = None
        self._most_pool_tokens, self._served_loras = 0, False  # of the workers that were ever attached
        self._unservable_since_s: dict[int, float] = {}  # by arrival index: waiting requests that no worker can hold
        self._output_length = output_length
        self._cache = cache
        self._workers = workers
        self._sessions = sessions
        self._matched: dict[int, Request] = {}  # by sequence: requests that the cache was asked to match
        self._deadlines: SortedDict[tuple[float, int], Request] = SortedDict()
        self._arrival_indexes = itertools.count(1)  # arrival indexes and queue positions
        self._front_positions = itertools.count(-1, -1)  # queue positions before all others
        self._sequences = itertools.count(1)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_arrival_index(self) -> int:
        return next(self._arrival_indexes)

    def next_sequence(self) -> int:
        """A sequence name for the cache that was never used."""
        return next(self._sequences)

    def accept(self, session: Session, request: Request, enqueue: bool = True) -> None:
        self.counters.accepted += 1
        session.live[request.handle] = request
        self.timeline.arrived(request, request.arrival_s)
        if request.deadline_s < math.inf:
            self._deadlines[request.deadline_s, request.arrival_index] = request
        if not enqueue:
            return
        if request.num_tokens >= request.max_total_tokens:  # resubmitted when only its ending was missing
            self.end(request, FinishReason.FINISH_REASON_LENGTH)
        else:
            self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Into the queue, in phase WAITING."""
        request.worker, request.slot = 0, -1
        self.queue.add(request)
        if self._cache.connected:
            self.ask_match(request)

    def ask_match(self, request: Request) -> None:
        """Make the request known to the cache, under a new name."""
        request.sequence, request.matches = self.next_sequence(), None
        request.num_registered, request.num_committed = request.num_tokens, 0
        self._cache.matches[request.sequence] = self._matched[request.sequence] = request

    def set_matches(self, found: Iterable[tuple[int, Iterable[WorkerMatch]]]) -> None:
        """What the cache holds of waiting sequences. A request that no longer waits ignores the update."""
        changed = []
        for sequence, matches in found:
            request = self._matched.get(sequence)
            if request is not None and request.phase is Phase.WAITING:
                request.matches = by_worker = {}
                for match in matches if not request.scores_prompt else ():
                    on_host = match.num_host_tokens
                    by_worker[match.worker] = PrefixMatch(match.num_tokens + on_host, match.num_live_tokens, on_host)
                changed.append(request)
        self.queue.rematched(changed)

    def dequeue(self, request: Request) -> None:
        """Take the request out of the queue before it has run: other requests run for it."""
        self.queue.remove(request)
        self._forget_sequence(request)

    def forget_matches(self) -> None:
        """The cache is gone, with everything it knew of waiting requests. KV in the workers' host memory is still
        there."""
        self._matched.clear()
        for request in self.queue:
            if not request.swapped_on:
                request.sequence, request.matches = 0, None

    def ask_all_matches(self) -> None:
        """The cache knows nothing of the waiting requests, or knows them under other names."""
        for request in self.queue:
            if not request.swapped_on:
                self._forget_sequence(request)
                self.ask_match(request)

    def recompute(self, requests: Iterable[Request], why: str = "lost its blocks in host memory") -> None:
        """These requests wait, and give up their KV in host memory: they compute their tokens again."""
        for request in list(requests):
            self._forget_sequence(request)
            self.note(request, "requeued", why)
            if self._cache.connected:
                self.ask_match(request)

    # ── bound and running ────────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, worker: WorkerState, request: Request, why: str = "") -> None:
        """`why`: the reason for this worker, for `paceline explain`."""
        # before it leaves the queue, which shows only those of the tenant's requests that still fit
        self.budgets.bind(request)
        self.queue.remove(request)
        request.siblings.num_bound += 1
        if request.swapped_on:
            self.swaps.bind(request)
        self.queue.started(request)
        request.advance(Event.SCHEDULE)
        request.worker = worker.id
        worker.bind_adapter(request)
        request.has_run = True
        if request.started_s is None:
            request.started_s = self.now_s
        if request.group is not None:
            if request.group.root.started_s is None:
                self.timeline.event(request.group.root, "running", "its beams", self.now_s)
            request.group.root.started_s = request.started_s
        apart = ", apart from others" if request.is_suspect else ""
        self.note(request, "running", f"on worker {worker.id}{apart}{why and f': {why}'}")

    def refused(self, request: Request) -> None:
        """The cache had less room than the step assumed. The request waits on, and the cache still knows it."""
        if not request.swapped_on:
            # the match was too good: the request is offered again when the cache has answered anew
            request.matches = None
            self._cache.rematches[request.sequence] = None
        self.requeue_unchanged(request)

    def requeue_unchanged(self, request: Request) -> None:
        """The request was about to get a slot, and waits again. It keeps its KV in host memory if it can still resume
        there."""
        self._unbind(request)
        request.advance(Event.REJECT)
        self.queue.add(request)
        if request.swapped_on:
            if self._workers[request.swapped_on].draining:
                self.recompute([request])
            else:
                self.swaps.refused(request)

    def unanswered(self, request: Request) -> None:
        """The cache was lost before it answered for this request."""
        self.requeue_unchanged(request)
        self.note(request, "waiting", "the cache was lost before it answered")

    def requeue(self, request: Request, event: Event = Event.REJECT) -> None:
        """Requeue a request under a new sequence name. The cache has granted blocks for it, or may have."""
        self._unbind(request)
        self._forget_sequence(request)
        request.advance(event)
        self.enqueue(request)

    def preempt(self, request: Request, requeue: str, mode: str, why: str) -> None:
        """Preempt the request: it waits again, with all its known tokens. `requeue` and `mode` as in PreemptionPolicy;
        `why` is for the timeline."""
        worker, swaps = self._workers[request.worker], self.swaps.suits(request, mode)
        self._vacate(request, swaps)
        request.num_preemptions += 1
        self.counters.preempted += 1
        match requeue:
            case "front":
                request.queue_position = next(self._front_positions)
            case "back":
                request.queue_position = next(self._arrival_indexes)
        self.note(request, "preempted", "moves to host memory" if swaps else why)
        if not swaps:
            self.requeue(request, Event.PREEMPT)
            return
        self._unbind(request)
        request.advance(Event.PREEMPT)
        self.swaps.start(worker, request)
        self.queue.add(request)

    def park(self, request: Request) -> None:
        """A beam has run its one token. It leaves its slot and keeps its blocks, so that other beams can fork from
        it."""
        worker = self._workers[request.worker]
        worker.slots.complete_tables()
        worker.vacate(request.slot)
        self._unbind(request)
        request.advance(Event.PARK)
        request.worker, request.parent = worker.id, None
        request.prompt_is_computed = True
        worker.parked[request.arrival_index] = request

    def unpark(self, request: Request) -> None:
        """No beam forks from this request any more, or not for certain."""
        if request.phase is Phase.PARKED:
            self._withdraw(request)

    def evacuate(self, worker: WorkerState, why: str, blamed: Collection[Request] = ()) -> list[Request]:
        """Take every live request off a lost worker, with all its known tokens. Their sequences are dropped. `why`: how
        the worker was lost. `blamed`: requests in the steps that this names."""
        for parked in list(worker.parked.values()):
            self._drop_parked(worker, parked)
        requests = worker.drop_pending_step()
        for slot in list(worker.running):
            self.flush_output(worker, slot)
            requests.append(self._leave(worker, slot))
        for request in requests:
            was_in_it = "; it was in that step and is retried apart from others" if request in blamed else ""
            self._lose_blocks(request, why + was_in_it)
        return sorted(requests, key=lambda request: request.arrival_index)

    def restore_refused(self, request: Request, why: str) -> None:
        """A new cache refuses to give the request its blocks back: the request computes its tokens again."""
        worker, why = self._workers.get(request.worker), f"the cache was lost, and its blocks with it: {why}"
        match request.phase:
            case Phase.RUNNING if worker is not None:
                self.flush_output(worker, request.slot)
                self._leave(worker, request.slot)
                self._lose_blocks(request, why)
                self.enqueue(request)
            case Phase.PARKED if worker is not None:
                self._drop_parked(worker, request)
            case Phase.WAITING:
                self.recompute([request], why)

    def _drop_parked(self, worker: WorkerState, parked: Request) -> None:
        del worker.parked[parked.arrival_index]
        self._matched.pop(parked.sequence, None)
        parked.advance(Event.LOSE)
        parked.sequence, parked.prompt_is_computed = 0, False
        del parked.block_table[:]

    def _lose_blocks(self, request: Request, why: str) -> None:
        """The request has neither blocks nor a sequence any more."""
        self._unbind(request)
        self._matched.pop(request.sequence, None)
        request.advance(Event.LOSE)
        request.sequence, request.swapped_on, request.host_blocks = 0, 0, b""
        self.counters.requeued += 1
        self.note(request, "requeued", why)

    def lost_worker(self, request: Request) -> None:
        """A request waits again because its worker is gone."""
        request.num_worker_losses += 1
        self.enqueue(request)

    def _vacate(self, request: Request, swaps: bool = False) -> None:
        """Take the request out of its slot. Only now the cache learns the tokens that it generated: another request
        rarely needs them earlier, and a steady step sends nothing for each sequence (as in SGLang). For a swap the
        cache has to know all tokens."""
        worker = self._workers[request.worker]
        self.flush_output(worker, request.slot)
        self._leave(worker, request.slot)
        num_tokens = request.num_tokens
        num_computed = max(num_tokens - 1, request.num_committed)  # the last token may just be computed, or not yet
        if self.config.partial_reuse:
            fills = num_tokens > request.num_registered
        else:
            fills = num_computed // worker.block_size > request.num_registered // worker.block_size
        is_news = fills and num_computed > request.num_committed  # no request can reuse a token that is not computed
        if swaps or (worker.prefix_caching and is_news and not request.kv_is_invalid):
            new_tokens = request.tokens_from(request.num_registered)
            self._cache.add_commit(request.sequence, new_tokens, num_computed)
            request.num_registered = num_tokens

    def _leave(self, worker: WorkerState, slot: int) -> Request:
        request = worker.vacate(slot)
        request.prompt_is_computed = False
        request.parent = None
        del request.block_table[:]
        return request

    def flush_output(self, worker: WorkerState, slot: int) -> None:
        """Complete the request's own record with the tokens in the slot's output buffer."""
        if tokens := worker.slots.output.flush(slot):
            worker.running[slot].add_output(tokens)

    def _unbind(self, request: Request) -> None:
        """The request neither runs nor is about to. The caller sets its next phase."""
        self.budgets.unbind(request)
        request.siblings.num_bound -= 1
        self.queue.free_tokens_changed(request.tenant)
        if worker := self._workers.get(request.worker):
            worker.unbind_adapter(request)
        request.worker = 0
        self.queue.stopped(request)

    def _forget_sequence(self, request: Request) -> None:
        if request.swapped_on:
            self.swaps.forget(request)
        if request.sequence and self._cache.connected:
            self._cache.forget_sequence(request.sequence, discard=request.kv_is_invalid)
        self._matched.pop(request.sequence, None)
        request.sequence = 0

    # ── over ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def fail_poisoned(self, request: Request, why: str) -> None:
        """The request was the only row of `poison_failures` failed steps in a row: it is not retried."""
        self.counters.poisoned += 1
        times = self.config.poison_failures
        self.fail(request, f"request: alone in what failed, {times} times in a row; the last time, {why}")

    def invalidate_kv(self, request: Request, message: str) -> None:
        """The worker could not compute the request. Nothing of it stays in the cache: other requests would reuse wrong
        KV."""
        request.kv_is_invalid = True
        self.fail(request, message)

    def fail(self, request: Request, message: str, code: int = CODE_INTERNAL) -> None:
        self.end(request, FinishReason.FINISH_REASON_ERROR, Rejection(code, message))

    def end(self, request: Request, reason: FinishReason.ValueType, error: Rejection | None = None) -> None:
        """End the request in any phase, and tell its session. A beam ends together with its search."""
        if request.group is not None:
            request = request.group.root
            for member in self._members_of(request):
                self._withdraw(member)
        self._withdraw(request)
        if request.deadline_s < math.inf:
            self._deadlines.pop((request.deadline_s, request.arrival_index), None)
        if reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH) and request.group is None:
            self._output_length.add(request.num_output_tokens)
        name = REASONS[reason]
        self.counters.finished[name] = self.counters.finished.get(name, 0) + 1
        self.timeline.ended(request, name if error is None else error.message, self.now_s)
        session = self._sessions.get(request.session_id)
        if session is not None and session.live.pop(request.handle, None) is not None:
            ending = session.add_ending()
            ending.handle, ending.reason = request.handle, reason
            ending.timing.CopyFrom(request.timing(self.now_s))
            if error is not None:
                explain_rejection(ending, error)
            if request.cached_tokens:
                ending.cached_tokens = request.cached_tokens
            ending.hypotheses.extend(request.hypotheses)

    def _members_of(self, root: Request) -> list[Request]:
        assert root.group is not None
        parked = [request for worker in self._workers.values() for request in worker.parked.values()]
        return [*root.group.members, *(request for request in parked if request.group is root.group)]

    def _withdraw(self, request: Request) -> None:
        """Take the request out of its phase, and free everything it holds."""
        match request.phase:
            case Phase.RUNNING:
                self._vacate(request)
                self._unbind(request)
            case Phase.ALLOCATING:
                self._unbind(request)
            case Phase.WAITING if request in self.queue:
                self.queue.remove(request)
            case Phase.PARKED:
                del self._workers[request.worker].parked[request.arrival_index]
                request.worker, request.prompt_is_computed = 0, False
                del request.block_table[:]
            case Phase.ENDED:
                return
        self._forget_sequence(request)
        request.advance(Event.END)
        # request and view refer to each other: without this its tokens would stay until a garbage collection
        request.view = None

    def note(self, request: Request, event: str, detail: str) -> None:
        """Add to the timeline, which knows only clients' requests, not members of a beam search."""
        if not request.is_member:
            self.timeline.event(request, event, detail, self.now_s)

    def end_late(self, now_s: float) -> None:
        """End the requests that have missed their deadline or one of the time-outs."""
        while late := [(request, why) for request, why in self._late(now_s) if request.phase is not Phase.ENDED]:
            for request, rejection in late:
                self.end(request, FinishReason.FINISH_REASON_ERROR, rejection)
            if not self.budgets.limits_tenants:
                break  # with tenant limits, requests that the order now sees may be late too

    def _late(self, now_s: float) -> Iterator[tuple[Request, Rejection]]:
        for request, message in self._too_late(now_s):
            yield request, Rejection(CODE_DEADLINE_EXCEEDED, message)
        limit_s, since_s = self.config.no_worker_timeout_s, self.no_worker_since_s
        if limit_s <= 0:
            return
        if since_s is not None:
            message = f"no worker is attached: waited for one for {limit_s:g} s"
            for request in self.queue if limit_s <= now_s - since_s else ():
                if now_s - request.arrival_s >= limit_s:
                    yield request, Rejection(CODE_UNAVAILABLE, message, retry_after_s=NO_WORKER_RETRY_S)
            return
        self._note_unservable(now_s)
        for request in self.queue if self._unservable_since_s else ():
            if now_s - self._unservable_since_s.get(request.arrival_index, now_s) >= limit_s:
                message = (
                    f"no attached worker can hold {request.max_total_tokens} tokens: waited for one for {limit_s:g} s"
                )
                yield request, Rejection(CODE_UNAVAILABLE, message, retry_after_s=NO_WORKER_RETRY_S)

    def _note_unservable(self, now_s: float) -> None:
        """Note since when waiting requests fit no attached worker, because a larger one has left. Looks at the queue
        only while the attached workers can hold less than workers before."""
        workers = [worker for worker in self._workers.values() if not worker.draining]
        most = max((worker.pool_tokens for worker in workers), default=0)
        serves_loras = any(worker.registration.max_loras for worker in workers)
        self._most_pool_tokens = max(self._most_pool_tokens, most)
        self._served_loras |= serves_loras
        before, self._unservable_since_s = self._unservable_since_s, {}
        if most == self._most_pool_tokens and serves_loras == self._served_loras:
            return
        for request in self.queue:
            if not any(worker.can_ever_hold(request) for worker in workers):
                self._unservable_since_s[request.arrival_index] = before.get(request.arrival_index, now_s)

    def _too_late(self, now_s: float) -> Iterator[tuple[Request, str]]:
        due = itertools.takewhile(lambda item: item[0][0] <= now_s, self._deadlines.items())
        for (deadline_s, _), request in due:
            yield request, f"deadline_s: {deadline_s - request.arrival_s:g} s are over"
        for request in self.queue.hopeless(now_s):
            left_s = request.deadline_s - now_s
            late = f"deadline_s: {left_s:.1f} s are left, which is too little"
            yield request, late if left_s < math.inf else "queue: the order policy gives it up"
        if (limit_s := self.config.waiting_timeout_s) > 0:
            oldest = itertools.takewhile(lambda request: now_s - request.arrival_s > limit_s, self.queue)
            yield from ((r, f"queue: waited for more than {limit_s:g} s") for r in oldest if r.started_s is None)
        if (limit_s := self.config.running_timeout_s) > 0:
            running = [request for worker in self._workers.values() for request in worker.running.values()]
            if self._workers:  # without any worker, the request cannot end, whatever it does
                running += self.queue
            yield from ((r, f"request: ran for more than {limit_s:g} s") for r in running if r.ran_s(now_s) > limit_s)
