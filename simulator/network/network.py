"""A network under a virtual clock: parties, and connections between them that delay, break and fall silent.

Nothing here knows what the messages mean. All chance comes from one seeded generator, and events of the same moment
happen in the order in which they were arranged, so a run can be repeated bit for bit (FoundationDB's way of testing).

A party may rely on what TCP and gRPC give it. Messages of one connection arrive in order, once each, or the connection
ends. An end that dies is noticed. An end that falls silent is noticed after the keepalive. Between connections there is
no order at all.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self

# Two seconds to the next ping, and two for its answer: the defaults of services/runtime/rpc.py. The links between real
# services ping more often (link_options() there), and notice within 2.5 s.
KEEPALIVE_S = 4.0
Action = Callable[[], object]


class SerializableMessage(Protocol):
    """What a connection carries: a protobuf message, or an object with the same two methods."""

    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


class Party:
    """A process. Its events happen while it runs; while it is frozen they wait; after its death they never happen."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.alive = True
        self.frozen = False
        self.slept_s = 0.0  # time for which its machine stood still, and its monotonic clock too
        self.leaving = False  # it was told to leave (SIGTERM)
        self.on_released: Action = lambda: None  # called when it has left
        self._backlog: list[Action] = []
        self.connections: list[SimulatedConnection] = []

    @property
    def clock_s(self) -> float:
        """Its own monotonic clock."""
        return self.network.now_s - self.slept_s

    def perform(self, action: Action) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(action)
        else:
            action()

    def after(self, delay_s: float, action: Action) -> None:
        """A timer of this process."""
        self.network.after(delay_s, lambda: self.perform(action))

    def every(self, period_s: float, action: Action) -> None:
        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def die(self) -> None:
        """SIGKILL: the operating system closes its connections."""
        self.alive, self.frozen = False, False
        self._backlog.clear()
        for connection in list(self.connections):
            connection.cut()

    def freeze(self) -> None:
        """SIGSTOP: it stays connected until the others' pings have waited long enough."""
        self.frozen = True
        for connection in list(self.connections):
            self.network.after(KEEPALIVE_S, partial(self._given_up, connection))

    def _given_up(self, connection: SimulatedConnection) -> None:
        if self.frozen:
            connection.cut()

    def thaw(self, slept_s: float = 0.0) -> None:
        """SIGCONT: messages that arrived during the freeze are delivered at once, except those of connections that
        broke meanwhile. A stopped clock continues where it was."""
        self.frozen = False
        self.slept_s += slept_s
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.perform(action)

    def drain(self) -> None:
        """SIGTERM: it finishes its work before the process ends, and calls `on_released`."""
        raise NotImplementedError

    # ── what a party does about its connections ──────────────────────────────────────────────────────────────────────

    def accepted(self, connection: SimulatedConnection) -> None:
        """Another party has connected."""
        raise NotImplementedError

    def connected(self, connection: SimulatedConnection) -> None:
        """A connection that this party dialled is established."""
        raise NotImplementedError

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        raise NotImplementedError

    def closed(self, connection: SimulatedConnection) -> None:
        """The connection is over, or was never established. Not called for the party that closed it."""
        raise NotImplementedError


class SimulatedConnection:
    """A stream of messages in both directions, from the moment at which `client` dialled."""

    def __init__(self, network: Network, client: Party, server: Party) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.silent = False
        self.refused = False  # by the server, for good (PERMISSION_DENIED)
        self._open = {client: True, server: True}
        self._last_arrival_s = {client: 0.0, server: 0.0}

    def __repr__(self) -> str:
        return f"{self.client.name}-{self.server.name}"

    def is_open(self, party: Party) -> bool:
        return self._open[party]

    def send(self, sender: Party, message: SerializableMessage) -> None:
        """The message is copied: later changes do not travel with it."""
        if self._open[sender]:
            data, kind = message.SerializeToString(), type(message)
            receiver = self.other(sender)
            self._deliver(receiver, lambda: receiver.received(self, kind.FromString(data)))

    def close(self, party: Party) -> None:
        """This end closes the connection."""
        self._leave(party)
        other = self.other(party)
        self._deliver(other, lambda: self._end(other))

    def cut(self) -> None:
        """The connection breaks: messages in flight are lost, and each end learns of it in its own time."""
        for party in (self.client, self.server):
            self.network.after(self.network.delay_s(), partial(party.perform, partial(self._end, party)))
        self.silent = True

    def fall_silent(self) -> None:
        """From now on no message passes in either direction, not even pings. After KEEPALIVE_S, both ends notice."""
        self.silent = True
        self.network.after(KEEPALIVE_S, self.cut)

    def other(self, party: Party) -> Party:
        return self.server if party is self.client else self.client

    def establish(self) -> None:
        """The server accepts the connection, if the server is alive; then the client learns of it. The connection
        breaks if the server has not accepted it after KEEPALIVE_S, for example because the server is frozen."""

        def accept() -> None:
            self.server.connections.append(self)
            self.server.accepted(self)
            self._deliver(self.client, lambda: self.client.connected(self))

        if not self.server.alive:
            self.cut()
            return
        self.network.after(KEEPALIVE_S, lambda: self.cut() if self not in self.server.connections else None)
        self._deliver(self.server, accept)

    def _deliver(self, receiver: Party, action: Action) -> None:
        """Deliver in the order of sending."""
        arrival_s = max(self._last_arrival_s[receiver], self.network.now_s + self.network.delay_s())
        self._last_arrival_s[receiver] = arrival_s

        def arrive() -> None:
            if not self.silent and self._open[receiver]:
                action()

        self.network.at(arrival_s, lambda: receiver.perform(arrive))

    def _end(self, party: Party) -> None:
        if self._open[party]:
            self._leave(party)
            party.closed(self)

    def _leave(self, party: Party) -> None:
        self._open[party] = False
        if self in party.connections:
            party.connections.remove(self)


class Network:
    """The clock, and the source of all random delays. `num_events` counts the events so far."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self._arranged: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def delay_s(self) -> float:
        """Mostly a millisecond, now and then much more, so messages of different connections overtake each other."""
        return self.rng.expovariate(1000.0) if self.rng.random() < 0.95 else self.rng.uniform(0.0, 0.3)

    def at(self, moment_s: float, action: Action) -> None:
        heapq.heappush(self._arranged, (max(moment_s, self.now_s), next(self._order), action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def connect(self, client: Party, server: Party) -> SimulatedConnection:
        """Connect. `client` learns whether it succeeded."""
        connection = SimulatedConnection(self, client, server)
        client.connections.append(connection)
        connection.establish()
        return connection

    def step(self) -> None:
        """Run the next event."""
        self.now_s, _, action = heapq.heappop(self._arranged)
        self.num_events += 1
        action()
