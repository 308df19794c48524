"""The records of a trace, and the clocks of the services that they came from.

Records keep the times of their own service. The offset of each clock is estimated from round trips. Scheduler: from the
gateway's calls. Worker: from plans and results. Cache: from exchanges. The last two are relative to the scheduler's
clock. A restarted scheduler counts as another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.cli.trace.clocks import ClockOffset, RoundTrip, estimate

Record = dict[str, Any]


@dataclass(slots=True)
class SchedulerRecords:
    """The records of one scheduler process, with the clocks of its cache and workers. The clock of a
    cache or a worker is None if its offset is not known."""

    epoch: int
    clock: ClockOffset
    cache_clock: ClockOffset | None
    worker_clocks: dict[int, ClockOffset | None]
    steps: list[Record] = field(default_factory=list)
    exchanges: list[Record] = field(default_factory=list)
    runs: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """Everything that was recorded."""

    schedulers: list[SchedulerRecords]
    messages: list[Record]
    written: list[Record]
    requests: list[Record]
    num_missed: int


def read_records(records: list[Record]) -> Trace:
    """The trace of all records that the gateway has sent, by scheduler process."""
    by_epoch: dict[int, list[Record]] = {}
    for record in records:
        if (part := record["scheduler"]) is not None:
            by_epoch.setdefault(part["epoch"], []).append(part)
    of_gateway = [record["gateway"] for record in records]
    return Trace(
        schedulers=[_scheduler(epoch, parts) for epoch, parts in by_epoch.items()],
        messages=[one for part in of_gateway for one in part["messages"]],
        written=[one for part in of_gateway for one in part["written"]],
        requests=[one for part in of_gateway for one in part["requests"]],
        num_missed=sum(part["num_missed"] for parts in by_epoch.values() for part in parts),
    )


def _scheduler(epoch: int, parts: list[Record]) -> SchedulerRecords:
    asked = (RoundTrip(one["asked_us"], one["received_us"], one["sent_us"], one["got_us"]) for one in parts)
    clock = estimate(asked) or ClockOffset(0.0, float("inf"))
    steps = [one for part in parts for one in part["steps"]]
    exchanges = [one for part in parts for one in part["exchanges"]]
    cache = estimate(
        RoundTrip(one["sent_us"], one["received_us"], one["answered_us"], one["ended_us"])
        for one in exchanges
        if one["received_us"]
    )
    workers: dict[int, list[RoundTrip]] = {}
    for step in steps:
        trips = workers.setdefault(step["worker"], [])
        if step["received_us"]:
            trips.append(RoundTrip(step["sent_us"], step["received_us"], step["result_sent_us"], step["ended_us"]))
    offsets = {worker: estimate(trips) for worker, trips in workers.items()}
    return SchedulerRecords(
        epoch=epoch,
        clock=clock,
        cache_clock=cache.after(clock) if cache is not None else None,
        worker_clocks={name: own.after(clock) if own is not None else None for name, own in offsets.items()},
        steps=steps,
        exchanges=exchanges,
        runs=[one for part in parts for one in part["runs"]],
    )
