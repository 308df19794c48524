"""The services as parties of a simulated network: real cores, with the behaviour of their asyncio shells.

    SchedulerParty   scheduler_svc/links.py around SchedulerCore (several schedulers with an election: election.py)
    CacheParty       cache_svc/server.py around CacheCore
    WorkerParty      gpu_worker/link.py around a toy worker (toy_worker.py)

Gateways are in gateway_party.py.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import LinkError
from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.inference_pb2 import SessionRequest
from paceline.v1.worker_pb2 import (
    Grammar,
    GrammarOrders,
    GrammarPrepared,
    Heartbeat,
    StepPlan,
    WorkerDrain,
    WorkerServiceLinkRequest,
    WorkerServiceLinkResponse,
)
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from services.runtime.fence import Fence, StaleScheduler
from simulator.exchanges import check_exchange, check_plan
from simulator.network.network import Network, Party, SimulatedConnection
from simulator.system import default_policies
from simulator.toy_worker import ToyWorker

Find = Callable[[], Party]  # returns the current process of a name
Dial = Callable[[Party], object]  # connects a party to the scheduler, as soon as there is one

RETRY_S = 0.2
TICK_S = 0.25
HEARTBEAT_S = 1.0
STEP_ALLOWED_S = 1.0
# How long gRPC waits for the open calls of a leaving party: a cache, and a scheduler (server.py of both).
LAST_CALLS_S = 0.2
LAST_STREAMS_S = 0.5


class SchedulerParty(Party):
    """A scheduler as a party of the network."""

    def __init__(self, network: Network, name: str, core: SchedulerCore, cache: Find) -> None:
        super().__init__(network, name)
        self.core = core
        self._cache = cache
        self._epochs = itertools.count(0)
        self._cache_link: SimulatedConnection | None = None
        self._sessions: dict[str, SimulatedConnection] = {}
        self._workers: dict[int, SimulatedConnection] = {}
        self._names: dict[SimulatedConnection, str | int] = {}  # the session or the worker at the other end
        self.begin()

    @property
    def leader_term(self) -> int:
        """Larger for every later leader."""
        return self.core.epoch

    def begin(self) -> None:
        """Start as the leader: tick, and connect to the cache."""
        self._epochs = itertools.count(self.core.epoch)
        self.every(TICK_S, lambda: self._event(self.core.tick, self.network.now_s))
        self.network.connect(self, self._cache())

    def drain(self) -> None:
        """The scheduler decides nothing more, and its streams end."""
        self.leaving = True
        self.after(LAST_STREAMS_S, self._end)

    def _end(self) -> None:
        for connection in list(self.connections):
            connection.close(self)
        self.on_released()

    def _event(self, handle: Callable[..., object], *args: object) -> None:
        if self.leaving:
            return
        try:
            handle(*args)
        finally:
            outbox = self.core.poll(self.network.now_s)
            for exchange in outbox.to_cache:
                assert self._cache_link is not None
                self._cache_link.send(self, exchange)
            for worker, message in outbox.to_workers:
                self._check(worker, message)
                if worker in self._workers:
                    self._workers[worker].send(self, message)
            for session, response in outbox.to_sessions:
                if session in self._sessions:
                    self._sessions[session].send(self, response)
            for worker, _ in outbox.lost_workers:
                if worker in self._workers:
                    self._hang_up(self._workers[worker])

    def _check(self, worker: int, message: WorkerServiceLinkResponse) -> None:
        """Check a plan, if the cache that granted its blocks still has the link to this scheduler. Otherwise the plan
        cannot be checked."""
        cache = self._cache_link.server if self._cache_link else None
        if message.HasField("plan") and isinstance(cache, CacheParty) and cache.link is self._cache_link:
            check_plan(cache.core, worker, message.plan)

    def accepted(self, connection: SimulatedConnection) -> None:
        if self.leaving:
            connection.close(self)
        # Otherwise there is nothing to do: the first message on the connection names its sender.

    def connected(self, connection: SimulatedConnection) -> None:
        if self.leaving:
            return
        self._cache_link = connection
        self._event(self.core.cache_connected, next(self._epochs))

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if self.leaving:
            return
        if isinstance(message, CacheServiceLinkResponse):
            self._from_cache(connection, message)
        elif isinstance(message, SessionRequest):
            self._from_session(connection, message)
        else:
            self._from_worker(connection, message)

    def closed(self, connection: SimulatedConnection) -> None:
        if self.leaving:
            return
        if connection.client is self:
            if connection is self._cache_link:
                self._cache_link = None
                self._event(self.core.cache_lost)
            self.after(RETRY_S, lambda: self.network.connect(self, self._cache()))
            return
        peer = self._names.pop(connection, None)
        if isinstance(peer, str):
            del self._sessions[peer]
            self._event(self.core.close_session, peer)
        elif isinstance(peer, int):
            del self._workers[peer]
            self._event(self.core.worker_lost, peer)

    def _hang_up(self, connection: SimulatedConnection) -> None:
        connection.close(self)
        self.closed(connection)

    def _from_cache(self, connection: SimulatedConnection, response: CacheServiceLinkResponse) -> None:
        try:
            self._event(self.core.cache_response, response)
        except ProtocolError:
            self._hang_up(connection)

    def _from_session(self, connection: SimulatedConnection, request: SessionRequest) -> None:
        if connection not in self._names:
            session = self._names[connection] = request.open.session_id
            self._sessions[session] = connection
            self._event(self.core.open_session, session, request.open.response_window)
        self._event(self.core.session_message, self._names[connection], request, self.network.now_s)

    def _from_worker(self, connection: SimulatedConnection, message: WorkerServiceLinkRequest) -> None:
        if message.HasField("registration"):
            name = self._names[connection] = self.core.register_worker(message.registration)
            self._workers[name] = connection
            self._event(lambda: None)
            return
        worker = self._names[connection]
        assert isinstance(worker, int)
        if worker not in self.core.workers:
            return
        try:
            match message.WhichOneof("message"):
                case "result":
                    self._event(self.core.worker_result, worker, message.result)
                case "heartbeat":
                    self._event(self.core.worker_heartbeat, worker, message.heartbeat)
                case "grammar":
                    self._event(self.core.worker_grammar, worker, message.grammar)
                case "drain":
                    self._event(self.core.worker_drain, worker)
        except ProtocolError:
            self._hang_up(connection)


def follow(party: Party, connection: SimulatedConnection, last: int) -> int:
    """The leader term that `party` follows from now on. Raises AssertionError if it has followed a later leader
    before."""
    scheduler = connection.client if connection.server is party else connection.server
    assert isinstance(scheduler, SchedulerParty)
    assert scheduler.leader_term >= last, f"{party.name} follows leader {scheduler.leader_term} after {last}"
    return scheduler.leader_term


class CacheParty(Party):
    """A cache. Every invariant of its core is checked after each event."""

    def __init__(self, network: Network, name: str) -> None:
        super().__init__(network, name)
        self.core = CacheCore()
        self.fence = Fence()
        self.link: SimulatedConnection | None = None
        self._leader_term = 0

    def drain(self) -> None:
        """Close the link after LAST_CALLS_S, because a link never ends by itself."""
        self.leaving = True
        self.after(LAST_CALLS_S, self._end)

    def _end(self) -> None:
        if self.link is not None:
            self.link.close(self)
        self.on_released()

    def accepted(self, connection: SimulatedConnection) -> None:
        if self.leaving:
            connection.close(self)
            return
        scheduler = connection.client
        assert isinstance(scheduler, SchedulerParty)
        try:
            self.fence.check(scheduler.core.fence)  # the call's metadata
        except StaleScheduler:
            connection.refused = True
            connection.close(self)
            return
        self._leader_term = follow(self, connection, self._leader_term)
        if self.link is not None:
            self.link.close(self)
        self.link = connection
        self._reset()

    def _reset(self) -> None:
        self.core.reset()
        self.core.check_invariants()

    def received(self, connection: SimulatedConnection, request: CacheServiceLinkRequest) -> None:
        if connection is not self.link:
            return
        try:
            response = self.core.exchange(request)
        except LinkError:
            connection.close(self)
            self.closed(connection)
            return
        check_exchange(self.core, request, response)
        connection.send(self, response)

    def closed(self, connection: SimulatedConnection) -> None:
        if connection is self.link:
            self.link = None
            self._reset()


class WorkerParty(Party):
    """A worker. Steps run one after the other, and each takes some time. A result goes only to the link by which its
    plan came. A leaving worker asks to be released; `on_released` is called when it is."""

    def __init__(self, network: Network, name: str, toy: ToyWorker, dial: Dial) -> None:
        super().__init__(network, name)
        self.toy = toy
        toy.registration.prepares_grammars = True
        self.fence = Fence()
        self._incarnation = f"{name} of {network.now_s}"
        self._dial = dial
        self._leader_term = 0
        self._link: SimulatedConnection | None = None
        self._plans: deque[StepPlan] = deque()
        self._is_registered = False
        self._grammar_due_s = 0.0  # when the last grammar will be prepared
        self.every(HEARTBEAT_S, self._beat)
        dial(self)

    def drain(self) -> None:
        self.leaving = True
        self._say(WorkerServiceLinkRequest(drain=WorkerDrain()))

    def connected(self, connection: SimulatedConnection) -> None:
        self._link = connection
        registration = WorkerServiceLinkRequest(registration=self.toy.registration)
        registration.registration.heartbeats = True
        registration.registration.incarnation = self._incarnation
        registration.registration.kept.extend(self.toy.kept())
        self._say(registration)
        if self.leaving:
            self._say(WorkerServiceLinkRequest(drain=WorkerDrain()))

    def received(self, connection: SimulatedConnection, message: WorkerServiceLinkResponse) -> None:
        match message.WhichOneof("message"):
            case "registered":
                try:
                    self.fence.check(message.registered.fence)
                except StaleScheduler:
                    self._hang_up(connection)
                    return
                self._leader_term = follow(self, connection, self._leader_term)
                self.toy.reset(keeps_blocks=True)
                self._plans.clear()
                self._is_registered = True
            case "plan":
                self._plans.append(message.plan)
                if len(self._plans) == 1:
                    self._begin(connection)
            case "grammars":
                self._prepare(connection, message.grammars)
            case "released":
                assert not self._plans, "released with a plan to run"
                self.on_released()

    def closed(self, connection: SimulatedConnection) -> None:
        self._link = None
        self._is_registered = False
        self._plans.clear()
        self.after(RETRY_S, lambda: self._dial(self))

    def _hang_up(self, connection: SimulatedConnection) -> None:
        connection.close(self)
        self.closed(connection)

    def _begin(self, connection: SimulatedConnection) -> None:
        seconds = 0.002 + self.network.delay_s()

        def run() -> None:
            if connection is not self._link:
                return  # the plan came by a link that has ended: no party needs its result
            result = self.toy.run(self._plans[0])
            self._plans.popleft()
            self._say(WorkerServiceLinkRequest(result=result))
            if self._plans:
                self._begin(connection)

        self.after(seconds, run)

    def _prepare(self, connection: SimulatedConnection, orders: GrammarOrders) -> None:
        """Prepare grammars one after the other. Each takes as long as several steps."""
        for number in orders.forget:
            self.toy.forget_grammar(number, self.toy.step + len(self._plans))
        for order in orders.prepare:
            self._grammar_due_s = max(self._grammar_due_s, self.network.now_s) + 0.01 + self.network.delay_s()

            def answer(order: Grammar = order) -> None:
                if connection is self._link:
                    refused = self.toy.prepare_grammar(order.id, order.grammar)
                    self._say(WorkerServiceLinkRequest(grammar=GrammarPrepared(id=order.id, refused=refused)))

            self.after(self._grammar_due_s - self.network.now_s, answer)

    def _beat(self) -> None:
        if self._is_registered:
            received, allowed_s = self.toy.step + len(self._plans), STEP_ALLOWED_S if self._plans else 0.0
            heartbeat = Heartbeat(step=self.toy.step, received=received, allowed_s=allowed_s)
            self._say(WorkerServiceLinkRequest(heartbeat=heartbeat))

    def _say(self, message: WorkerServiceLinkRequest) -> None:
        if self._link is not None:
            self._link.send(self, message)


def new_scheduler_core(config: SchedulerConfig, policies: Callable[[], Policies], epoch: int) -> SchedulerCore:
    """A core for a simulated run: an error in a policy raises AssertionError."""

    def fail(error: Exception) -> None:
        raise AssertionError(f"policy failed: {error!r}") from error

    return SchedulerCore(config, policies(), default_policies, epoch, on_policy_error=fail)
