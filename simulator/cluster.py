"""A fleet of simulated workers with the real scheduler and cache cores, on a virtual clock.

A discrete-event run: clients submit, workers run plans in order, workers join and die. Cores take no virtual time. Only
steps, pauses and the gaps between arrivals do. The same sessions, fleet, policies and seed give the same run, event by
event.

    cluster = Cluster(fleet=[WorkerSpec()] * 4, policies=build(choose()), seed=1)
    cluster.run(sessions)  # the results: cluster.asked, cluster.lived, cluster.tokens_by_s
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache_svc.core.cache import CacheCore
from paceline.v1.common_pb2 import FINISH_REASON_STOP, SamplingParams
from paceline.v1.inference_pb2 import Ending, SessionRequest, SessionResponse, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.fleet import TimedWorker, WorkerSpec, sampled_tokens

SESSION = "clients"
MAX_TOKENS = 4096  # max_tokens of every request; every request ends earlier, by an end-of-sequence token
RAMP_S = 2.0  # time in which the first sessions of a closed run begin, as many as its concurrency
TICK_S = 0.25  # interval at which the scheduler's core gets the time
# A run is given up after this time on the virtual clock without the end of a request.
STALL_S = 600.0


class Turn(NamedTuple):
    """One request of a client's session. Its prompt is everything before it, outputs included, and `new_tokens`."""

    pause_s: float  # after the end of the previous turn; for a first turn: after the arrival
    new_tokens: npt.NDArray[np.int32]
    num_output_tokens: int


class ClientSession(NamedTuple):
    """Requests of one client, one after another. `arrival_s` counts only in an open run."""

    arrival_s: float
    turns: Sequence[Turn]


@dataclass(slots=True)
class SentRequest:
    """A request and its progress."""

    session: ClientSession
    turn: int
    prompt: npt.NDArray[np.int32]
    asked_s: float
    num_output_tokens: int
    first_s: float = -1.0
    ended_s: float = -1.0
    cached_tokens: int = 0


@dataclass(slots=True)
class AttachedWorker:
    """An attached worker: its waiting plans, and the running one."""

    worker: TimedWorker
    id: int
    joined_s: float
    plans: deque[StepPlan] = field(default_factory=deque)
    runs: bool = False


class Lived(NamedTuple):
    """A worker's part in a run, from its joining to its end or the run's."""

    worker: TimedWorker
    alive_s: float


class Cluster:
    """`jitter` is the largest relative deviation of a step's time. Only client and worker know how long an output will
    be: a request asks for 4,096 tokens and ends by an end-of-sequence token. Raises RuntimeError if a run makes no
    progress, and AssertionError if a request does not get exactly its tokens."""

    def __init__(
        self,
        fleet: Sequence[WorkerSpec],
        policies: Policies,
        seed: int = 0,
        jitter: float = 0.03,
        config: SchedulerConfig | None = None,
    ) -> None:
        self.now_s = 0.0
        self.asked: list[SentRequest] = []
        self.lived: list[Lived] = []
        self.tokens_by_s: list[tuple[float, int]] = []  # arrival times and numbers of output tokens
        self.cache = CacheCore()
        config = config or SchedulerConfig(
            max_queued_requests=1 << 30, max_queued_tokens=1 << 60, no_worker_timeout_s=0.0
        )
        self.core = SchedulerCore(config, policies, lambda: build(choose()), epoch=1, on_policy_error=_raise)
        self.core.open_session(SESSION, 1 << 30)
        self.core.cache_connected(1)
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._links: dict[int, AttachedWorker] = {}
        self._closed: deque[ClientSession] = deque()  # sessions that wait for the end of another one
        self._open_requests = 0
        self._starts = 0  # turns that are scheduled but have not started
        self._handles = np.empty(0, np.int64)  # of the last message with handles
        self._received = np.zeros(1024, np.int64)  # output tokens by handle
        self._lengths = np.zeros_like(self._received)  # number of output tokens at which a request ends, by handle
        self._is_closed = False
        self._ended_at_s = 0.0
        self.last_start_s = 0.0  # when the last session began
        for number, spec in enumerate(fleet):
            worker = TimedWorker(f"worker-{number}", spec, seed * 1000 + number, jitter)
            self._at(spec.joins_s, partial(self._join, worker))

    def run(self, sessions: Iterable[ClientSession], concurrency: int = 0) -> None:
        """Play all sessions to their end. `concurrency`: number of sessions that run at any time, without pauses
        (closed loop); 0: each begins at its arrival, with its pauses (open loop)."""
        self._is_closed = concurrency > 0
        if concurrency:
            self._closed.extend(sessions)
            first = min(concurrency, len(self._closed))
            for i in range(first):
                self._start_next(RAMP_S * i / first)
        else:
            for session in sessions:
                self._starts += 1
                self._at(session.arrival_s + session.turns[0].pause_s, partial(self._start, session))
        self._at(TICK_S, self._tick)
        while self._open_requests or self._starts or self._closed:
            if not self._events or self.now_s > self._ended_at_s + STALL_S:
                raise RuntimeError(f"no request has ended since {self._ended_at_s:.1f} s, {self._open_requests} wait")
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        for link in self._links.values():
            self.lived.append(Lived(link.worker, self.now_s - link.joined_s))
        self._links.clear()

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _at(self, at_s: float, action: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), action))

    def _tick(self) -> None:
        self.core.tick(self.now_s)
        self._settle()
        self._at(self.now_s + TICK_S, self._tick)

    def _join(self, worker: TimedWorker) -> None:
        id = self.core.register_worker(worker.registration())
        self._links[id] = AttachedWorker(worker, id, self.now_s)
        if worker.spec.dies_s < float("inf"):
            self._at(worker.spec.dies_s, partial(self._die, id))
        self._settle()

    def _die(self, id: int) -> None:
        link = self._links.pop(id)
        self.lived.append(Lived(link.worker, self.now_s - link.joined_s))
        self.core.worker_lost(id)
        self._settle()

    def _start_next(self, at_s: float) -> None:
        self._starts += 1
        self._at(at_s, partial(self._start, self._closed.popleft()))

    def _start(self, session: ClientSession) -> None:
        self._starts -= 1
        self.last_start_s = self.now_s
        self._ask(session, 0, session.turns[0].new_tokens)

    def _ask(self, session: ClientSession, turn: int, prompt: npt.NDArray[np.int32]) -> None:
        num_output_tokens = session.turns[turn].num_output_tokens
        self.asked.append(SentRequest(session, turn, prompt, self.now_s, num_output_tokens))
        self._open_requests += 1
        handle = len(self.asked)
        if handle == len(self._received):
            self._received = np.concatenate((self._received, np.zeros_like(self._received)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        self._lengths[handle] = num_output_tokens
        submission = Submission(
            handle=handle,
            request_id=str(handle),
            prompt_token_ids=prompt.tobytes(),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, top_p=1.0, seed=num_output_tokens),
        )
        self.core.session_message(SESSION, SessionRequest(submissions=[submission]), self.now_s)
        self._settle()

    def _run_step(self, link: AttachedWorker) -> None:
        """Begin the worker's next plan."""
        link.runs = True
        result, seconds = link.worker.run(link.plans.popleft())
        result.started_us = round(self.now_s * 1e6)
        result.finished_us = round((self.now_s + seconds) * 1e6)
        self._at(self.now_s + seconds, partial(self._finish_step, link, result))

    def _finish_step(self, link: AttachedWorker, result: StepResult) -> None:
        if link.id not in self._links:
            return  # the worker died in this step
        link.runs = False
        if link.plans:
            self._run_step(link)
        self.core.worker_result(link.id, result)
        self._settle()

    # ── what the servers do ──────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Move messages until neither core has any."""
        while True:
            outbox = self.core.poll(self.now_s)
            for id, message in outbox.to_workers:
                link = self._links.get(id)
                if link is not None and message.HasField("plan"):
                    link.plans.append(message.plan)
                    if not link.runs:
                        self._run_step(link)
            for _, response in outbox.to_sessions:
                self._take(response)
            if not outbox.to_cache:
                return
            for exchange in outbox.to_cache:
                self.core.cache_response(self.cache.exchange(exchange))

    def _take(self, response: SessionResponse) -> None:
        if response.handles:
            self._handles = np.array(response.handles, np.int64)
            for handle in self._handles[self._received[self._handles] == 0].tolist():
                self.asked[handle - 1].first_s = self.now_s
        if response.token_ids:
            tokens = np.frombuffer(response.token_ids, np.int32)
            # A message is about one step, so no handle occurs twice in it.
            handles = self._handles
            expected = sampled_tokens(handles, self._received[handles], self._lengths[handles])
            assert np.array_equal(tokens, expected), "a request does not get the tokens that it would get alone"
            self._received[handles] += 1
            self.tokens_by_s.append((self.now_s, len(tokens)))
        for ending in response.endings:
            self._end(ending)

    def _end(self, ending: Ending) -> None:
        asked = self.asked[ending.handle - 1]
        assert ending.reason == FINISH_REASON_STOP, ending.message
        num_received = self._received[ending.handle]
        assert num_received == asked.num_output_tokens, f"request {ending.handle} got {num_received} tokens"
        asked.ended_s = self._ended_at_s = self.now_s
        asked.cached_tokens = ending.cached_tokens
        self._open_requests -= 1
        following = asked.turn + 1
        if following < len(asked.session.turns):
            turn = asked.session.turns[following]
            positions = np.arange(asked.num_output_tokens)
            numbers = np.full_like(positions, ending.handle)
            output = sampled_tokens(numbers, positions, np.full_like(positions, asked.num_output_tokens))
            prompt = np.concatenate((asked.prompt, output, turn.new_tokens))
            pause_s = 0.0 if self._is_closed else turn.pause_s
            self._starts += 1
            self._at(self.now_s + pause_s, partial(self._go_on, asked.session, following, prompt))
        elif self._closed:
            self._start_next(self.now_s)

    def _go_on(self, session: ClientSession, turn: int, prompt: npt.NDArray[np.int32]) -> None:
        self._starts -= 1
        self._ask(session, turn, prompt)


def _raise(error: Exception) -> None:
    raise AssertionError(f"a policy failed: {error!r}") from error
