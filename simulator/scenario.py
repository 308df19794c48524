"""`paceline scenario`: what every step of a small workload decides, on the real cores (docs/scenarios.md).

Scheduler and cache run in this process with a null worker; its steps take no time. The window is 1, so every step is
decided after the previous one has finished.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cache_svc.core.cache import CacheCore
from paceline.v1.common_pb2 import FinishReason, ModelInfo, SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.scenario_file import VOCAB, Scenario, ScenarioRequest

# A run is given up after this many steps in a row without a decision.
MAX_IDLE_STEPS = 50


class PolicyFailed(Exception):
    """A policy of the scenario raised, or asked for something impossible."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Scheduled:
    """The part of a request in a step."""

    id: str
    tokens: int
    cached_tokens: int
    phase: str


@dataclass(slots=True)
class ScenarioStep:
    """What one step decides, and the state after it."""

    step: int
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[dict[str, str]] = field(default_factory=list)
    rejected: list[dict[str, str]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    free_blocks: int = 0
    cached_blocks: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(slots=True)
class ScenarioOutcome:
    """All steps of a scenario."""

    steps: list[ScenarioStep]
    num_steps: int
    generated_tokens: dict[str, int]
    stuck: bool = False

    def as_json(self) -> dict[str, Any]:
        result = asdict(self)
        if not self.stuck:
            del result["stuck"]
        return result


@dataclass(slots=True)
class ScenarioSlot:
    """The null worker's state of a slot."""

    name: str
    remaining: int  # tokens to compute before it samples
    cached: int
    paused: bool = False

    @property
    def decodes(self) -> bool:
        return self.remaining == 0


class NullWorker:
    """Runs plans by arithmetic alone. Every token that it "samples" is unique."""

    def __init__(self) -> None:
        self.slot_states: dict[int, ScenarioSlot] = {}
        self.swapped: set[str] = set()  # requests that are swapped out
        self._tokens = itertools.count(VOCAB - 2, -1)

    def run(self, plan: StepPlan) -> tuple[list[Scheduled], StepResult]:
        for slot in _ints(plan.free_slots):
            del self.slot_states[slot]
        for new in plan.new_sequences:
            cached = new.num_cached_tokens
            self.slot_states[new.slot] = ScenarioSlot(new.request_id, len(new.token_ids) // 4 - cached, cached)
        for slot in _ints(plan.hold_slots):
            self.slot_states[slot].paused = True
        for slot in _ints(plan.resume_slots):
            self.slot_states[slot].paused = False
        decodes = (
            [] if plan.skip_decodes else sorted(s for s, slot_state in self.slot_states.items() if slot_state.decodes)
        )
        scheduled = [
            Scheduled(self.slot_states[slot].name, 1, 0, "decode")
            for slot in decodes
            if not self.slot_states[slot].paused
        ]
        num_sampled = len(scheduled)
        for slot, tokens in zip(_ints(plan.prefill_slots), _ints(plan.prefill_tokens), strict=True):
            slot_state = self.slot_states[slot]
            if slot_state.name in self.swapped:  # it resumes: no prompt is computed
                self.swapped.remove(slot_state.name)
                scheduled.append(Scheduled(slot_state.name, tokens, 0, "decode"))
            else:
                scheduled.append(Scheduled(slot_state.name, tokens, slot_state.cached, "prefill"))
            slot_state.remaining -= tokens
            slot_state.cached = 0
            num_sampled += slot_state.decodes
        sampled = np.array(list(itertools.islice(self._tokens, num_sampled)), np.int32)
        return scheduled, StepResult(step=plan.step, token_ids=sampled.tobytes())


class ScenarioRun:
    """Plays one scenario on real cores."""

    def __init__(self, scenario: Scenario, policies: Policies, **config: Any) -> None:
        """`config`: other fields of SchedulerConfig."""
        self.scenario = scenario
        loras = scenario.max_loras or len({request.lora for request in scenario.requests if request.lora})
        scheduler_config = SchedulerConfig(
            window=1,
            prefix_caching=scenario.prefix_caching,
            # As in the schedulers that a scenario is compared with: none of them copies parts of blocks by the same
            # rules, or caches in host memory.
            partial_reuse=False,
            host_cache=False,
            max_queued_requests=1 << 30,
            max_queued_tokens=1 << 60,
            **config,
        )
        self.core = SchedulerCore(scheduler_config, policies, lambda: build(choose()), epoch=1, on_policy_error=_raise)
        self.cache = CacheCore()
        self.worker = NullWorker()
        self.core.open_session("scenario", window=1 << 30)
        self.core.cache_connected(1)
        registration = WorkerRegistration(
            name="null",
            model=ModelInfo(name="null", fingerprint="null", vocab_size=VOCAB, max_model_len=scenario.max_model_len),
            block_size=scenario.block_size,
            num_blocks=scenario.num_blocks,
            num_host_blocks=scenario.num_host_blocks,
            max_num_seqs=min(scenario.max_num_seqs, len(scenario.requests)),  # a slot costs memory
            max_batched_tokens=scenario.max_batched_tokens,
            max_loras=loras,
        )
        self.worker_id = self.core.register_worker(registration)
        self.generated: dict[str, int] = {request.id: 0 for request in scenario.requests}
        self.requests: list[Request] = []
        self._submissions = self._make_submissions()
        self._names = {submission.handle: submission.request_id for _, submission in self._submissions}
        self._num_preemptions: dict[str, int] = defaultdict(int)
        self._empty_steps = 0
        self._arrived_until = -1
        self._handles: list[int] = []
        self._plan: StepPlan | None = None

    def play(self) -> ScenarioOutcome:
        """Play steps until no request is waiting or running. The outcome is `stuck` after more than MAX_IDLE_STEPS
        steps in a row without a decision."""
        steps: list[ScenarioStep] = []
        idle = 0
        arrivals = sorted({at for at, _ in self._submissions})
        self._settle(ScenarioStep(-1))
        while True:
            step = ScenarioStep(len(steps))
            self._submit(step)
            empty = ScenarioStep(step.step)
            self._settle(step, empty)
            if self.core.counters.empty_steps > self._empty_steps:
                self._empty_steps = self.core.counters.empty_steps
                self._observe(empty)
                steps.append(empty)
                step.step, step.preempted = len(steps), []
            result = None
            if self._plan is not None:
                step.scheduled, result = self.worker.run(self._plan)
                self._plan = None
            self._observe(step)
            if result is not None:
                self.core.worker_result(self.worker_id, result)
                self._endings(step)
            pending = any(at > self._arrived_until for at in arrivals)
            if not (step.scheduled or step.waiting or step.running or step.rejected or pending):
                return ScenarioOutcome(steps, len(steps), self.generated)
            steps.append(step)
            idle = 0 if step.scheduled or step.rejected or pending else idle + 1
            if not (step.waiting or step.running or pending) and not step.scheduled:
                return ScenarioOutcome(steps, len(steps), self.generated)
            if idle > MAX_IDLE_STEPS:
                return ScenarioOutcome(steps[: -idle + 1], len(steps) - idle + 1, self.generated, stuck=True)
            if not pending and not self.core.queue and not self._live():
                return ScenarioOutcome(steps, len(steps), self.generated)

    def _live(self) -> bool:
        return any(worker.batch.running or worker.pending_step for worker in self.core.workers.values())

    def _submit(self, step: ScenarioStep) -> None:
        """Queue the requests that have arrived since the last call. An empty step takes number N after the next step
        was already decided. That next step becomes N + 1, so requests that arrive at N + 1 are queued for N + 2."""
        arriving = [submission for at, submission in self._submissions if self._arrived_until < at <= step.step]
        self._arrived_until = step.step
        if arriving:
            self.core.session_message("scenario", SessionRequest(submissions=arriving), 0.0)
            self.requests += list(self.core.queue)[-len(arriving) :]

    def _settle(self, step: ScenarioStep, empty: ScenarioStep | None = None) -> None:
        """Let scheduler and cache exchange messages until neither has any."""
        while True:
            outbox = self.core.poll(0.0)
            for _, message in outbox.to_workers:
                if message.HasField("plan"):
                    self._plan = message.plan
            for _, response in outbox.to_sessions:
                self._take(response, step)
            for exchange in outbox.to_cache:
                self.core.cache_response(self.cache.exchange(exchange))
            for request in self.requests:  # by now the cache has answered the swaps, so the mode is known
                if request.history.num_preemptions > self._num_preemptions[request.request_id]:
                    self._num_preemptions[request.request_id] = request.history.num_preemptions
                    for record in (step, empty) if empty else (step,):
                        record.preempted.append({"id": request.request_id, "mode": self._mode(request)})
            if not outbox.to_cache:
                return

    def _mode(self, request: Request) -> str:
        """How the request was preempted."""
        if not request.held.swapped_on:
            self.worker.swapped.discard(request.request_id)
            return "recompute"
        self.worker.swapped.add(request.request_id)
        return "swap"

    def _endings(self, step: ScenarioStep) -> None:
        """Deliver the step's result, without deciding the next step."""
        session = self.core.sessions["scenario"]
        while (message := session.next_message()) is not None:
            self._take(message, step)

    def _take(self, message: Any, step: ScenarioStep) -> None:
        self._handles = list(message.handles) or self._handles
        for handle in self._handles if message.handles or message.same_handles else ():
            self.generated[self._names[handle]] += 1
        for ending in message.endings:
            name = self._names[ending.handle]
            if ending.reason == FinishReason.FINISH_REASON_ERROR:
                step.rejected.append({"id": name, "reason": ending.message})
            else:
                step.finished.append(name)

    def _observe(self, step: ScenarioStep) -> None:
        running = self.core.workers[self.worker_id].batch.running.values()
        order = {request.request_id: i for i, request in enumerate(running)}
        step.scheduled.sort(key=lambda scheduled: order.get(scheduled.id, 0))
        for pool in self.cache.pool_counters():
            step.free_blocks, step.cached_blocks = pool.free_blocks, pool.cached_blocks
        step.waiting = len(self.core.queue)
        step.running = len(order)

    def _make_submissions(self) -> list[tuple[int, Submission]]:
        # Token ids that a scenario names differ from all invented ones.
        named = {token for request in self.scenario.requests for token in request.prompt or ()}
        ids = (token for token in itertools.count(1) if token not in named)
        families: dict[str, list[int]] = {}
        submissions = []
        for handle, request in enumerate(self.scenario.requests):
            prompt = request.prompt
            if prompt is None:
                shared = request.prefix.len if request.prefix else 0
                family = families.setdefault(request.prefix.family, []) if request.prefix else []
                family += itertools.islice(ids, max(0, shared - len(family)))
                own = itertools.islice(ids, (request.prompt_len or 0) - shared)
                prompt = [*family[:shared], *own]
            submissions.append((request.arrive, self._submission(handle, request, prompt)))
        return submissions

    @staticmethod
    def _submission(handle: int, request: ScenarioRequest, prompt: list[int]) -> Submission:
        return Submission(
            handle=handle,
            request_id=request.id,
            prompt_token_ids=np.array(prompt, np.int32).tobytes(),
            sampling=SamplingParams(max_tokens=request.max_new_tokens, top_p=1.0, ignore_eos=True),
            priority=request.priority,
            tenant=request.tenant,
            lora=request.lora or "",
            offline=request.offline,
        )


def play(scenario: Scenario, **config: Any) -> ScenarioOutcome:
    """Raises PolicyError for an unknown preset or option, and PolicyFailed if a policy fails."""
    return ScenarioRun(scenario, scenario.policies(), **config).play()


def _ints(packed: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, np.int32).tolist()
    return numbers


def _raise(error: Exception) -> None:
    raise PolicyFailed(error) from error
