"""The whole control plane in one process: real cores, any worker, queues for links, and a virtual clock.

Each queue keeps its order. There are two queues for the cache (to it, from it) and three for each worker (plans,
results, grammars). The caller chooses which queue moves next, so every order of messages in different queues can be
played, with faults. Messages of a session arrive at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cache_svc.core.cache import CacheCore
from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import Ending, QueueRoom, SchedulerStatus, SessionRequest, SessionResponse, Submission
from paceline.v1.worker_pb2 import Grammar, GrammarPrepared, StepFailure, StepPlan, StepResult, WorkerRegistration
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.exchanges import check_exchange, check_plan
from simulator.toy_worker import StepRaised, ToyWorker, WorkerDied


def default_policies() -> Policies:
    return build(choose())


def raise_policy_error(error: Exception) -> None:
    """In a test, a failing policy is a failure."""
    raise AssertionError(f"policy failed: {error!r}") from error


class StepWorker(Protocol):
    """Runs plans: a toy, or a real model."""

    registration: WorkerRegistration

    def reset(self, keeps_blocks: bool = False) -> None: ...

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(slots=True)
class WorkerEnd:
    """A worker, and its messages in flight."""

    worker: StepWorker
    id: int
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult | StepFailure] = field(default_factory=deque)
    grammars: deque[Grammar] = field(default_factory=deque)  # to prepare
    released: bool = False
    failed: bool = False


@dataclass(slots=True)
class Client:
    """What a session has received."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    prompt_scores: dict[int, dict[int, float]] = field(default_factory=dict)  # by handle and position
    embeddings: dict[int, bytes] = field(default_factory=dict)  # packed float32
    num_read: int = 0
    status: SchedulerStatus | None = None
    room: QueueRoom | None = None
    handles: list[int] = field(default_factory=list)  # of the last message that had any

    def take(self, message: SessionResponse) -> None:
        self.num_read += 1
        if message.HasField("status"):
            self.status = message.status
        if message.HasField("room"):
            self.room = message.room
        if message.handles:
            self.handles = list(message.handles)
        handles = self.handles if message.handles or message.same_handles else []
        for handle, token in zip(handles, np.frombuffer(message.token_ids, np.int32).tolist(), strict=True):
            assert handle not in self.endings, f"a token of {handle} after its ending"
            self.tokens.setdefault(handle, []).append(token)
        for score in message.scores:
            self.scores.setdefault(score.handle, []).append(score.logprob)
        for part in message.prompt_scores:
            assert part.handle not in self.tokens, f"log probabilities of the prompt of {part.handle} after a token"
            logprobs = np.frombuffer(part.logprobs.logprobs, np.float32).tolist()
            self.prompt_scores.setdefault(part.handle, {}).update(enumerate(logprobs, start=part.logprobs.start))
        for embedding in message.embeddings:
            known = embedding.handle in self.embeddings or embedding.handle in self.endings
            assert not known, f"an embedding of {embedding.handle} after another one or its ending"
            self.embeddings[embedding.handle] = embedding.values
        for ending in message.endings:
            assert ending.handle not in self.endings, f"{ending.handle} ended twice"
            self.endings[ending.handle] = ending


class LocalSystem:
    """A scheduler and a cache with the queues of their links."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        policies: Policies | None = None,
        on_policy_error: Callable[[Exception], None] = raise_policy_error,
    ) -> None:
        self.now_s = 0.0
        self.scheduler = SchedulerCore(
            config or SchedulerConfig(),
            policies or default_policies(),
            default_policies,
            epoch=1,
            on_policy_error=on_policy_error,
        )
        self.cache = CacheCore()
        self.cache_epoch, self.has_cache = 0, False
        self.to_cache: deque[CacheServiceLinkRequest] = deque()
        self.from_cache: deque[CacheServiceLinkResponse] = deque()
        self.workers: list[WorkerEnd] = []
        self.clients: dict[str, Client] = {}
        self.connect_cache()

    # ── things that happen ───────────────────────────────────────────────────────────────────────────────────────────

    def restart_cache(self) -> None:
        """The cache dies and comes back empty."""
        self.lose_cache()
        self.connect_cache()

    def lose_cache(self) -> None:
        """Break the cache link, until it is connected again."""
        self.has_cache = False
        self.to_cache.clear()
        self.from_cache.clear()
        self.scheduler.cache_lost()
        self.poll()

    def connect_cache(self) -> None:
        """Connect to a cache that knows nothing."""
        self.has_cache = True
        self.cache = CacheCore()
        self.cache_epoch += 1
        self.scheduler.cache_connected(self.cache_epoch)
        self.poll()

    def attach(self, worker: StepWorker, keeps_blocks: bool = False) -> WorkerEnd:
        worker.reset(keeps_blocks)
        end = WorkerEnd(worker, self.scheduler.register_worker(worker.registration))
        self.workers.append(end)
        self.poll()
        return end

    def kill(self, end: WorkerEnd) -> None:
        self.workers.remove(end)
        self.scheduler.worker_lost(end.id)
        self.poll()

    def open(self, session_id: str, window: int = 64) -> Client:
        self.scheduler.open_session(session_id, window)
        self.clients[session_id] = Client()
        self.poll()
        return self.clients[session_id]

    def submit(self, session_id: str, handle: int, prompt: list[int], sampling: SamplingParams, **fields: Any) -> None:
        """`fields`: other fields of the submission, such as priority and tenant."""
        submission = Submission(
            handle=handle,
            request_id=f"{session_id}-{handle}",
            prompt_token_ids=np.array(prompt, np.int32).tobytes(),
            sampling=sampling,
            **fields,
        )
        self.scheduler.session_message(session_id, SessionRequest(submissions=[submission]), self.now_s)
        self.poll()

    def cancel(self, session_id: str, handle: int) -> None:
        self.scheduler.session_message(session_id, SessionRequest(cancels=[handle]), self.now_s)
        self.poll()

    # ── links that move ──────────────────────────────────────────────────────────────────────────────────────────────

    def moves(self) -> list[tuple[str, WorkerEnd | None]]:
        """Every link with a message to deliver, and every worker with a step to run or a grammar to prepare."""
        moves: list[tuple[str, WorkerEnd | None]] = []
        if self.to_cache:
            moves.append(("exchange", None))
        if self.from_cache:
            moves.append(("answer", None))
        for end in self.workers:
            if end.plans:
                moves.append(("step", end))
            if end.results:
                moves.append(("result", end))
            if end.grammars and not end.failed:
                moves.append(("grammar", end))
        return moves

    def move(self, kind: str, end: WorkerEnd | None) -> None:
        if kind == "exchange":
            request = self.to_cache.popleft()
            response = self.cache.exchange(request)
            check_exchange(self.cache, request, response)
            self.from_cache.append(response)
            return
        if kind == "step":
            assert end is not None
            self._step(end)
            return
        if kind == "grammar":
            assert end is not None
            assert isinstance(end.worker, ToyWorker)
            grammar = end.grammars.popleft()
            refused = end.worker.prepare_grammar(grammar.id, grammar.grammar)
            self.scheduler.worker_grammar(end.id, GrammarPrepared(id=grammar.id, refused=refused))
        elif kind == "answer":
            self.scheduler.cache_response(self.from_cache.popleft())
        else:
            assert end is not None
            news = end.results.popleft()
            if isinstance(news, StepFailure):
                self.workers.remove(end)
                self.scheduler.worker_failed(end.id, news)
            else:
                self.scheduler.worker_result(end.id, news)
        self.poll()

    def _step(self, end: WorkerEnd) -> None:
        plan = end.plans.popleft()
        try:
            end.results.append(end.worker.run(plan))
        except StepRaised as error:
            end.plans.clear()
            end.failed = True
            end.results.append(StepFailure(first_step=plan.step, last_step=plan.step, message=str(error)))
        except WorkerDied:
            self.kill(end)

    def poll(self) -> None:
        outbox = self.scheduler.poll(self.now_s)
        self.to_cache.extend(outbox.to_cache)
        by_id = {end.id: end for end in self.workers}
        for worker_id, message in outbox.to_workers:
            end = by_id.get(worker_id)
            if end is None or end.failed:
                continue  # the worker does not listen any more
            if message.HasField("plan"):
                check_plan(self.cache, worker_id, message.plan)
                end.plans.append(message.plan)
                assert len(end.plans) + len(end.results) <= (
                    self.scheduler.config.window or end.worker.registration.window or 2
                )
            elif message.HasField("grammars"):
                assert isinstance(end.worker, ToyWorker)
                for number in message.grammars.forget:
                    end.worker.forget_grammar(number, end.worker.step + len(end.plans))
                end.grammars.extend(message.grammars.prepare)
            elif message.HasField("released"):
                end.released = True
        for session_id, response in outbox.to_sessions:
            client = self.clients[session_id]
            client.take(response)
            acknowledged = SessionRequest(responses_read=client.num_read)
            self.scheduler.session_message(session_id, acknowledged, self.now_s)

    def run_for(self, num_moves: int) -> bool:
        """Move the first link that can move, at most this often. Returns whether everything came to rest."""
        for _ in range(num_moves):
            moves = self.moves()
            if not moves:
                return True
            self.move(*moves[0])
        return not self.moves()

    def run(self) -> None:
        """Run until no link can move."""
        assert self.run_for(100_000), "does not come to rest"

    def assert_at_rest(self) -> None:
        """Nothing is left: no request, no sequence, no used block (invariant 1 of docs/design.md)."""
        assert not self.moves()
        for queue in (self.scheduler.queue.online, self.scheduler.queue.offline):
            assert not any([len(queue), queue.num_requests, queue.num_tokens, queue.tenant_tokens])
        for worker in self.scheduler.workers.values():
            assert not worker.batch.running
            assert not worker.in_flight
            assert worker.available_blocks == worker.num_blocks, "blocks are still in use"
            assert worker.host.free_blocks == worker.registration.num_host_blocks, "host blocks are still in use"
            assert not worker.host.swapped
            assert not worker.host.swap_outs
