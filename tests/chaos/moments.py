"""What befell which service when, and what a client may notice: a pause, unless its own gateway was the victim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.asking import Break, Gateway

SERVICES = ("worker", "cache", "scheduler", "gateway")
# So long after a gateway is back a gRPC channel may still say that it was not there: it waits up to a second, and a
# fifth of it by chance, before it tries to connect again (services/client).
BACKOFF_S = 1.5
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "cut", "silent")


class Cell(NamedTuple):
    service: str
    fault: str
    workload: str


@dataclass
class Moment:
    """From the first of its faults until all services are there again. `gateway`: where faults of gateways are done."""

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
        """Whether its gateway was the victim in a way that shows to clients.

        One that is told to leave finishes what it has, and refuses the new. One that was frozen, or cut off from the
        scheduler, makes clients wait, and answers none of them with an error: they may leave it, no more.
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
    """Of a break: `problem` says what was wrong with it. If it was right, the client had lost patience with a gateway
    that was well ("elsewhere": because of what befell others), or its gateway was a victim."""

    problem: str
    elsewhere: bool = False


def judge(broken: Break, moments: Sequence[Moment]) -> Verdict:
    if any(moment.excuses(broken) for moment in moments):
        return Verdict("")
    during = [moment.what for moment in moments if moment.overlaps(broken.silent_since_s, broken.time_s)]
    if broken.kind == "gave up" and during:
        return Verdict("", elsewhere=True)
    return Verdict(f"{broken.kind}, during {', then '.join(during) or 'nothing'}: {broken.why}"[:500])
