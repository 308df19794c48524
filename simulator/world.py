"""A whole Paceline under a virtual clock: gateways, scheduler, cache and workers, with faults.

A run plays one schedule (schedule.py). In every run, each client has to get the tokens of an undisturbed run, each once
and in order; and at the end nothing may be left anywhere (docs/design.md, invariants).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from services.gateway.engine.session_core import SessionCore
from simulator.network.clients import SimulatedClients
from simulator.network.election import TTL_S, ElectedScheduler
from simulator.network.etcd import EtcdData, EtcdParty
from simulator.network.gateway_party import GatewayParty
from simulator.network.network import KEEPALIVE_S, Network, Party
from simulator.network.parties import RETRY_S, CacheParty, SchedulerParty, WorkerParty, new_scheduler_core
from simulator.schedule import NUM_GATEWAYS, ClientScript, Fault, PartySizes, Schedule
from simulator.toy_worker import ToyWorker

PATIENCE_S = 120.0  # after the last event of the schedule; a request that is still open then never ends
START_S = 0.5  # after this time a scheduler that lost its lease is started again
QUIET_S = 2 * KEEPALIVE_S + 1  # time in which every party notices its lost peers


class World:
    """Raises AssertionError, at the latest from `run`, if a promise is broken."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.sizes = PartySizes.of(schedule.seed)
        self.network = Network(schedule.seed)
        self.parties: dict[str, Party] = {}
        self.clients = SimulatedClients(self.network, self._gateway)
        self._leaving: set[Party] = set()  # parties that were told to leave, and have not left yet
        self._epochs = itertools.count(1)
        self._num_gateways = itertools.count(1)
        self._last_s = max([0.0, *(f.at_s + f.for_s for f in schedule.faults), *(ask.at_s for ask in schedule.asks)])
        self._pending = len(schedule.asks) + len(schedule.faults)  # open parts of the schedule
        self.etcd = EtcdData()
        # Only a kill makes the scheduler blame innocent requests for good. After any other fault, the same
        # process registers again, or the scheduler has released the worker before its process ended.
        kills = [fault for fault in schedule.faults if fault.kind == "kill" and fault.target.startswith("worker")]
        self._poison_failures = SchedulerConfig().poison_failures + len(kills)
        self._schedulers = ["scheduler", "scheduler-2"][: self.sizes.num_schedulers]
        names = [f"worker-{i}" for i in range(self.sizes.num_workers)] + [f"gateway-{i}" for i in range(NUM_GATEWAYS)]
        for name in ["cache", *(["etcd"] if self._elects else []), *self._schedulers, *names]:
            self._start(name)
        for ask in schedule.asks:
            self.network.at(ask.at_s, partial(self._ask, ask))
        for fault in schedule.faults:
            self.network.at(fault.at_s, partial(self._befall, fault))

    def run(self) -> None:
        while self._pending or next(self._unfinished(), None):
            self._step()
        quiet_s = self.network.now_s + QUIET_S + 2 * TTL_S * self._elects
        while self.network.now_s < quiet_s:
            self._step()
        self._check_rest()

    def _step(self) -> None:
        self.network.step()
        assert self.network.now_s < self._last_s + PATIENCE_S, f"does not come to rest: {[*self._unfinished()]}"

    @property
    def _elects(self) -> bool:
        return self.sizes.num_schedulers > 1

    def _unfinished(self) -> Iterator[str]:
        """The names of leaving parties and of clients that still wait."""
        yield from (party.name for party in self._leaving)
        yield from self.clients.unfinished()

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _gateway(self, number: int) -> GatewayParty:
        party = self.parties[f"gateway-{number}"]
        assert isinstance(party, GatewayParty)
        return party

    def _ask(self, ask: ClientScript) -> None:
        self._pending -= 1
        self.clients.ask(ask)

    def _find(self, name: str) -> Callable[[], Party]:
        return lambda: self.parties[name]

    def _start(self, name: str) -> None:
        """A new process of that name, which knows nothing of earlier ones."""
        match name.partition("-")[0]:
            case "cache":
                party: Party = CacheParty(self.network, name)
            case "etcd":
                party = EtcdParty(self.network, name, self.etcd, TTL_S)
            case "scheduler":
                party = self._scheduler(name)
            case "worker":
                party = WorkerParty(self.network, name, self._toy(), self._dial_leader)
            case _:
                window = self.sizes.response_window
                name_of_session = f"{name}-{next(self._num_gateways)}"
                session = SessionCore(name_of_session, response_window=window, max_live=100, wait_s=1000.0)
                party = GatewayParty(self.network, name, session, self._dial_leader, self.clients.news)
        self.parties[name] = party

    def _scheduler(self, name: str) -> SchedulerParty:
        config = SchedulerConfig(
            window=self.sizes.window,
            poison_failures=self._poison_failures,
            speculative_tokens=self.sizes.speculative_tokens,
            speculative_max_rows=self.sizes.speculative_max_rows,
            speculative_ngram_min=1,
        )
        cache = self._find("cache")
        if not self._elects:
            core = new_scheduler_core(config, self._policies, 1000 * next(self._epochs))
            return SchedulerParty(self.network, name, core, cache)
        core = new_scheduler_core(config, self._policies, 0)
        return ElectedScheduler(self.network, name, core, cache, self._find("etcd"), self.etcd, self._stepped_down)

    def _stepped_down(self, party: Party) -> None:
        self._restart(party, START_S)

    def _dial_leader(self, client: Party) -> None:
        """As services/runtime/leaders.py: ask all schedulers whether they serve, and dial one that does."""
        if not self._elects:
            self.network.connect(client, self.parties["scheduler"])
            return

        def look() -> None:
            serving = self._leaders()
            if serving:
                self.network.connect(client, self.network.rng.choice(serving))
            else:
                client.after(RETRY_S, look)

        client.after(self.network.delay_s(), look)

    def _leaders(self) -> list[ElectedScheduler]:
        """The schedulers that believe they are the leader."""
        parties = [self.parties[name] for name in self._schedulers]
        return [party for party in parties if isinstance(party, ElectedScheduler) and party.serves]

    def _policies(self) -> Policies:
        options = {"mode": self.sizes.mode, "watermark": 0.0, "chunked_prefill": True}
        return build(choose(self.sizes.preset, {}, options))

    def _toy(self) -> ToyWorker:
        sizes = self.sizes
        return ToyWorker(
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            max_num_seqs=4,
            max_batched_tokens=32,
            num_host_blocks=sizes.num_host_blocks,
        )

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _befall(self, fault: Fault) -> None:
        party = self._named(fault.target)
        match fault.kind:
            case "kill" if party.alive:
                self._restart(party, fault.for_s)
            case "freeze" | "suspend" if party.alive:
                party.freeze()
                self._later(fault.for_s, partial(party.thaw, fault.for_s if fault.kind == "suspend" else 0.0))
            case "isolate" if isinstance(party, ElectedScheduler):
                party.cut_off(fault.for_s)
            case "drain" if self._stays(party):
                self._leaving.add(party)
                party.on_released = lambda: self._restart(party, fault.for_s)
                party.perform(party.drain)
                party.perform(partial(self.clients.draining, party))
            case "cut" | "silence" if party.connections:
                connection = party.connections[fault.which % len(party.connections)]
                connection.cut() if fault.kind == "cut" else connection.fall_silent()
        self._pending -= 1

    def _stays(self, party: Party) -> bool:
        """Whether the process may be told to leave: it is alive, and is not leaving already."""
        return party.alive and party not in self._leaving

    def _named(self, target: str) -> Party:
        if target != "leader":
            return self.parties[target]
        parties = [self.parties[name] for name in self._schedulers]
        return max(parties, key=lambda party: party.leader_term if isinstance(party, ElectedScheduler) else 0)

    def _restart(self, party: Party, for_s: float) -> None:
        party.die()
        self._leaving.discard(party)
        self.clients.lost(party)
        self._later(for_s, lambda: self._start(party.name))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action after this delay. The run does not end before the action has run."""
        self._pending += 1

        def happen() -> None:
            self._pending -= 1
            action()

        self.network.after(delay_s, happen)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_rest(self) -> None:
        """Every party has found its peers again, and nothing is left anywhere."""
        (scheduler,) = self._leaders() if self._elects else [self.parties["scheduler"]]
        cache = self.parties["cache"]
        assert isinstance(scheduler, SchedulerParty)
        assert isinstance(cache, CacheParty)
        core = scheduler.core
        for queue in (core.queue.online, core.queue.offline):
            assert not any([len(queue), queue.num_requests, queue.num_tokens, queue.tenant_tokens])
        assert len(core.workers) == self.sizes.num_workers, "not every worker is back"
        assert len(core.sessions) == NUM_GATEWAYS, "not every gateway is back, or a gateway has two sessions"
        for session in core.sessions.values():
            assert not session.live
        for worker in core.workers.values():
            busy = [worker.batch.running, worker.in_flight, worker.host.swapped, worker.host.swap_outs]
            assert not any(busy), f"worker {worker.id} is busy"
            assert worker.available_blocks == worker.num_blocks, "blocks are still in use"
            assert worker.host.free_blocks == worker.registration.num_host_blocks, "host blocks are still in use"
        known = [*cache.core.waiting, *cache.core.admitted, *cache.core.swapped]
        assert not known, f"the cache still knows of sequences {known}"
