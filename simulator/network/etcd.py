"""An etcd that stores only the leader and its epoch, and a scheduler's connection to it.

It answers the requests of scheduler_svc/etcd.py except `shared_secret`, under the same names. Leases end when their
time is over, or a little later. An etcd that was killed gives all leases their time again when it is back, as etcd
does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from simulator.network.network import Action, Network, Party, SimulatedConnection

LOOK_S = 0.1
RETRY_S = 0.1


class _Json:
    def SerializeToString(self) -> bytes:
        return json.dumps(dataclasses.astuple(self)).encode()  # type: ignore[call-overload]

    @classmethod
    def FromString(cls, data: bytes) -> Self:
        return cls(*json.loads(data))


@dataclass(frozen=True)
class EtcdQuestion(_Json):
    """A request to etcd."""

    number: int
    method: str
    arguments: list[Any]


@dataclass(frozen=True)
class EtcdAnswer(_Json):
    """etcd's answer to a request."""

    number: int
    value: Any


@dataclass(slots=True)
class EtcdData:
    """The data on etcd's disk. `leader_terms` lists the lease of each leader so far, in order. The simulation uses this
    list to check that no earlier leader acts or is followed."""

    ends_s: dict[int, float] = field(default_factory=dict)  # end of each lease
    leader: int | None = None  # the leader's lease
    epoch: int = 0
    leader_terms: list[int] = field(default_factory=list)


class EtcdParty(Party):
    """An etcd as a party of the network."""

    def __init__(self, network: Network, name: str, data: EtcdData, ttl_s: float) -> None:
        super().__init__(network, name)
        self.data = data
        self._ttl_s = ttl_s
        self._watching: dict[SimulatedConnection, int] = {}  # number of the question
        for lease in data.ends_s:
            data.ends_s[lease] = network.now_s + ttl_s
        self.every(LOOK_S, self._end_leases)

    def accepted(self, connection: SimulatedConnection) -> None:
        pass

    def closed(self, connection: SimulatedConnection) -> None:
        self._watching.pop(connection, None)

    def received(self, connection: SimulatedConnection, ask: EtcdQuestion) -> None:
        if ask.method == "wait_until_left" and self.data.leader is not None:
            self._watching[connection] = ask.number
            return
        methods: dict[str, Callable[..., Any]] = {
            "grant": self._grant,
            "renew": self._renew,
            "revoke": self._revoke,
            "read_leader": lambda: (self.data.leader, self.data.epoch),
            "claim": self._claim,
            "wait_until_left": lambda: None,
        }
        connection.send(self, EtcdAnswer(ask.number, methods[ask.method](*ask.arguments)))

    def _grant(self) -> int:
        lease = self.network.rng.getrandbits(60)
        self.data.ends_s[lease] = self.network.now_s + self._ttl_s
        return lease

    def _renew(self, lease: int) -> float:
        if lease not in self.data.ends_s:
            return 0.0
        self.data.ends_s[lease] = self.network.now_s + self._ttl_s
        return self._ttl_s

    def _revoke(self, lease: int) -> None:
        self.data.ends_s.pop(lease, None)
        if lease == self.data.leader:
            self.data.leader = None
            for connection, number in self._watching.items():
                connection.send(self, EtcdAnswer(number, None))
            self._watching.clear()

    def _claim(self, last_epoch: int, lease: int, epoch: int) -> bool:
        data = self.data
        if data.leader is not None or data.epoch != last_epoch or lease not in data.ends_s:
            return False
        assert epoch > data.epoch, f"a leader of epoch {epoch} after one of {data.epoch}"
        data.leader, data.epoch = lease, epoch
        data.leader_terms.append(lease)
        return True

    def _end_leases(self) -> None:
        for lease in [lease for lease, end_s in self.data.ends_s.items() if end_s <= self.network.now_s]:
            self._revoke(lease)


class WayToEtcd:
    """The connection of one party to etcd. The party calls `connected`, `received` and `closed` for the events of
    `link`. If a question gets no answer in time, all open questions fail and the connection is replaced."""

    def __init__(self, party: Party, etcd: Callable[[], Party], timeout_s: float) -> None:
        self.link: SimulatedConnection | None = None  # dialled, and not necessarily connected yet
        self._party = party
        self._etcd = etcd
        self._timeout_s = timeout_s
        self._is_connected = False
        self._numbers = itertools.count(1)
        # open questions: what to call with the answer, or on failure
        self._open: dict[int, tuple[Callable[[Any], object], Action]] = {}
        self._cut_off_until_s = 0.0
        self._dial()

    def ask(
        self,
        method: str,
        *arguments: Any,
        then: Callable[[Any], object],
        failed: Action,
        timeout_s: float | None = None,
    ) -> None:
        if self.link is None or not self._is_connected:
            self._party.after(RETRY_S, failed)
            return
        number = next(self._numbers)
        self._open[number] = then, failed
        self.link.send(self._party, EtcdQuestion(number, method, list(arguments)))
        self._party.after(self._timeout_s if timeout_s is None else timeout_s, lambda: self._expire(number))

    def cut_off(self, for_s: float) -> None:
        """Silence the current connection for good, and each new connection that is dialled during this time."""
        self._cut_off_until_s = self._party.network.now_s + for_s
        if self.link is not None:
            self.link.fall_silent()

    def connected(self) -> None:
        self._is_connected = True

    def received(self, answer: EtcdAnswer) -> None:
        if answer.number in self._open:
            then, _ = self._open.pop(answer.number)
            then(answer.value)

    def closed(self) -> None:
        self.link, self._is_connected = None, False
        self._party.after(RETRY_S, self._dial)
        failed, self._open = list(self._open.values()), {}
        for _, fail in failed:
            fail()

    def _dial(self) -> None:
        network = self._party.network
        self.link = link = network.connect(self._party, self._etcd())
        if network.now_s < self._cut_off_until_s:
            link.fall_silent()
        self._party.after(self._timeout_s, lambda: self._give_up(link) if not self._is_connected else None)

    def _expire(self, number: int) -> None:
        if number in self._open and self.link is not None:
            self._give_up(self.link)

    def _give_up(self, link: SimulatedConnection) -> None:
        if link is self.link:
            link.close(self._party)
            self.closed()
