"""Faults of services, and their allowed effects: a pause for all clients; errors only if a gateway has the fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.asking import Break, Gateway

SERVICES = ("worker", "cache", "scheduler", "gateway")
# A gRPC channel may report a failed connection this long after the gateway is back: it waits up to 1 s, plus a random
# fifth, before it connects again (services/client).
BACKOFF_S = 1.5
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "cut", "silent")


class Cell(NamedTuple):
    service: str
    fault: str
    workload: str


@dataclass
class Moment:
    """The time from the first fault until all services are back. `gateway`: the one that gets faults of gateways."""

    cells: Sequence[Cell]
    gateway: Gateway
    begin_s: float
    end_s: float = field(default=float("inf"))

    @property
    def what(self) -> str:
        return " and ".join(f"{cell.service} {cell.fault}" for cell in self.cells)

    def overlaps(self, begin_s: float, end_s: float) -> bool:
        return self.begin_s < end_s and begin_s < self.end_s

    def excuses(self, broken: Break) -> bool:
        """Whether a fault of the client's gateway explains the break.

        A draining gateway finishes its requests and refuses new ones. A gateway that was frozen, or cut off from the
        scheduler, makes clients wait but answers no request with an error, so a client may only leave it.
        """
        faults = {cell.fault for cell in self.cells if cell.service == "gateway"}
        since_s = broken.silent_since_s - (BACKOFF_S if "failed to connect" in broken.why else 0.0)
        if broken.gateway != self.gateway or not faults or not self.overlaps(since_s, broken.time_s):
            return False
        if broken.kind == "gave up":
            return True
        if "SIGTERM" in faults and broken.asked_s > self.begin_s:
            return True
        # A connection to a frozen process may fail in gRPC's own ways.
        return broken.kind == "lost" and bool(faults & {"SIGKILL", "SIGSTOP"})


class Verdict(NamedTuple):
    """Whether a break was allowed. `problem`: why not; "" if it was. `elsewhere`: the client left a healthy gateway
    because of a fault in another service."""

    problem: str
    elsewhere: bool = False


def judge(broken: Break, moments: Sequence[Moment]) -> Verdict:
    if any(moment.excuses(broken) for moment in moments):
        return Verdict("")
    during = [moment.what for moment in moments if moment.overlaps(broken.silent_since_s, broken.time_s)]
    if broken.kind == "gave up" and during:
        return Verdict("", elsewhere=True)
    return Verdict(f"{broken.kind}, during {', then '.join(during) or 'nothing'}: {broken.why}"[:500])
