"""Several schedulers with an election: scheduler_svc/election.py with events instead of coroutines.

Two properties are checked against the truth (etcd.py). A leader that was succeeded does nothing more: that is what
leases are for, and it holds as long as clocks run. And no worker, gateway or cache follows an earlier leader after a
later one: that is what epochs are for, and it holds always.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scheduler_svc.core.lease import RENEWALS, LeaseClock, next_epoch
from scheduler_svc.core.scheduler import SchedulerCore
from simulator.network.etcd import RETRY_S, EtcdAnswer, EtcdData, WayToEtcd
from simulator.network.network import Action, Network, Party, SimulatedConnection
from simulator.network.parties import Find, SchedulerParty

TTL_S = 3.0
CLOCKS_DIFFER_MS = 3_600_000


class ElectedScheduler(SchedulerParty):
    """Stands by until it is elected. `on_end` is called when it has lost its lead and ends. `on_released` is called
    when it drains and may leave."""

    def __init__(
        self,
        network: Network,
        name: str,
        core: SchedulerCore,
        cache: Find,
        etcd: Find,
        data: EtcdData,
        on_end: Callable[[Party], None],
    ) -> None:
        self._lease_clock = LeaseClock()
        self._leader_term = 0  # number of its leadership, from 1; 0: never elected
        self._data = data
        self._lease = 0
        self._on_end = on_end
        self._ahead_ms = network.rng.randrange(CLOCKS_DIFFER_MS)
        super().__init__(network, name, core, cache)
        self._etcd = WayToEtcd(self, etcd, TTL_S / 4)
        self._campaign()

    @property
    def leader_term(self) -> int:
        return self._leader_term

    @property
    def serves(self) -> bool:
        """Whether its health says that it serves."""
        return bool(self._leader_term) and self.alive and not self.frozen and not self.leaving

    @property
    def holds(self) -> bool:
        return self._lease_clock.holds(self.clock_s)

    def cut_off(self, for_s: float) -> None:
        """Cut off from etcd."""
        self._etcd.cut_off(for_s)

    def drain(self) -> None:
        """Close all links, and then give the lease back: the scheduler must not send anything without the lease."""
        self.leaving = True
        for connection in list(self.connections):
            if connection is not self._etcd.link:
                connection.close(self)
        self._give_back(then=lambda: self.on_released())

    # ── as a party ───────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Do nothing. _answered() begins the scheduler's work when the scheduler is elected."""

    def _event(self, handle: Callable[..., object], *args: object) -> None:
        if self.leaving or not self.alive:
            return
        if not self.holds:
            self._step_down()
            return
        assert self._leader_term == len(self._data.leader_terms) or self.slept_s, f"{self.name} acts, and was succeeded"
        super()._event(handle, *args)

    def accepted(self, connection: SimulatedConnection) -> None:
        if not self._leader_term or self.leaving:
            connection.close(self)

    def connected(self, connection: SimulatedConnection) -> None:
        if connection is self._etcd.link:
            self._etcd.connected()
        elif not self.leaving:
            super().connected(connection)

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if isinstance(message, EtcdAnswer):
            self._etcd.received(message)
        else:
            super().received(connection, message)

    def closed(self, connection: SimulatedConnection) -> None:
        if connection is self._etcd.link:
            self._etcd.closed()
        elif connection.refused:
            self._step_down()
        elif not self.leaving:
            super().closed(connection)

    def _step_down(self) -> None:
        if self.alive and not self.leaving:
            self._on_end(self)

    # ── the election ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _campaign(self) -> None:
        if not self.leaving:
            self._etcd.ask("read_leader", then=self._seen, failed=self._retry)

    def _retry(self) -> None:
        self.after(RETRY_S, self._campaign)

    def _seen(self, record: tuple[int | None, int]) -> None:
        leader, last_epoch = record
        if leader is not None:
            again = self._campaign
            self._etcd.ask("wait_until_left", then=lambda _: again(), failed=again, timeout_s=TTL_S)
            return
        self._etcd.ask("grant", then=partial(self._granted, self.clock_s, last_epoch), failed=self._retry)

    def _granted(self, asked_s: float, last_epoch: int, lease: int) -> None:
        self._lease = lease
        epoch = next_epoch(last_epoch, int(self.clock_s * 1000) + self._ahead_ms)
        give_back = partial(self._give_back, then=self._retry)
        then = partial(self._answered, asked_s, epoch)
        self._etcd.ask("claim", last_epoch, lease, epoch, then=then, failed=give_back)

    def _answered(self, asked_s: float, epoch: int, won: bool) -> None:
        if won:
            self._lease_clock.extend(asked_s, TTL_S)
        if not self.holds or self.leaving:
            self._give_back(then=self._retry)
            return
        self._leader_term = self._data.leader_terms.index(self._lease) + 1
        self.core.epoch = self.core.fence = epoch
        super().begin()
        self._renew_after(TTL_S / RENEWALS)

    def _give_back(self, then: Action) -> None:
        self._lease_clock.end()
        self._etcd.ask("revoke", self._lease, then=lambda _: then(), failed=then)

    def _renew_after(self, pause_s: float) -> None:
        self.after(min(pause_s, max(self._lease_clock.ends_s - self.clock_s, 0.0)), self._renew)

    def _renew(self) -> None:
        if self.leaving:
            return
        if not self.holds:
            self._step_down()
            return
        asked_s = self.clock_s
        then, failed = partial(self._renewed, asked_s), partial(self._renew_after, RETRY_S)
        self._etcd.ask("renew", self._lease, then=then, failed=failed)

    def _renewed(self, asked_s: float, ttl_s: float) -> None:
        if not ttl_s:
            self._step_down()
            return
        self._lease_clock.extend(asked_s, ttl_s)
        self._renew_after(TTL_S / RENEWALS)
