"""Trace events for Perfetto and chrome://tracing.

The format: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), its
JSON object with complete (X), nestable asynchronous (b, e), counter (C) and metadata (M) events. What can overlap on
one track is asynchronous, because complete events of a thread must nest.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from services.cli.trace.clocks import ClockOffset
from services.cli.trace.records import Record, SchedulerRecords, Trace

Event = dict[str, Any]
GATEWAY = 1
_MESSAGES, _WRITTEN, _REQUESTS = 1, 2, 3
_CORE, _EXCHANGES, _STEPS = 1, 2, 3
_COMPUTE, _LINK = 1, 2
_FIRST_PID = 10


@dataclass(slots=True)
class _Events:
    """Collects events with absolute times."""

    events: list[Event] = field(default_factory=list)
    names: list[Event] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def process(self, pid: int, name: str, threads: dict[int, str]) -> None:
        self.names.append(_metadata("process_name", pid, 0, {"name": name}))
        self.names.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, thread in threads.items():
            self.names.append(_metadata("thread_name", pid, tid, {"name": thread}))

    def slice(self, pid: int, tid: int, name: str, began: float, ended: float, args: Event | None = None) -> None:
        duration = max(ended - began, 0.0)
        self.events.append(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": began, "dur": duration, "args": args or {}}
        )

    def overlapping(
        self, pid: int, tid: int, kind: str, spans: list[tuple[str, float, float]], args: Event | None = None
    ) -> None:
        """The first span is the outer one. The others are inside it, one after the other."""
        (name, began, ended), *inner = spans
        common = {"pid": pid, "tid": tid, "cat": kind, "id": f"{kind}-{next(self._ids)}"}
        ended = max(ended, began)
        self.events.append({**common, "ph": "b", "name": name, "ts": began, "args": args or {}})
        for part, start, end in inner:
            start, end = (min(max(time, began), ended) for time in (start, end))
            self.events.append({**common, "ph": "b", "name": part, "ts": start, "args": {}})
            self.events.append({**common, "ph": "e", "name": part, "ts": max(end, start)})
        self.events.append({**common, "ph": "e", "name": name, "ts": ended})

    def counter(self, pid: int, name: str, at: float, value: int) -> None:
        self.events.append({"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": at, "args": {"value": value}})


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The content of the file. Times begin with 0. Events are in the order of their times."""
    made = _Events()
    _gateway(made, trace)
    pids = itertools.count(_FIRST_PID)
    clocks = {}
    for scheduler in trace.schedulers:
        suffix = f" (epoch {scheduler.epoch})" if len(trace.schedulers) > 1 else ""
        pid = next(pids)
        _scheduler(made, scheduler, pid, suffix)
        clocks[f"scheduler{suffix}"] = scheduler.clock
        if scheduler.cache_clock is not None:
            _cache(made, scheduler, scheduler.cache_clock, next(pids), suffix)
            clocks[f"cache{suffix}"] = scheduler.cache_clock
        for worker, clock in scheduler.worker_clocks.items():
            steps = [step for step in scheduler.steps if step["worker"] == worker]
            name = f"worker {worker} ({steps[0]['name']}){suffix}"
            _in_flight(made, scheduler, steps, pid, name)
            if clock is not None:
                _worker(made, scheduler, steps, clock, next(pids), name)
                clocks[name] = clock
    start = min((event["ts"] for event in made.events), default=0.0)
    for event in made.events:
        event["ts"] = round(event["ts"] - start, 1)
        if "dur" in event:
            event["dur"] = round(event["dur"], 1)
    # sort() is stable: if two spans begin at the same moment, the outer span's event stays before the inner span's.
    made.events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*made.names, *made.events],
        "displayTimeUnit": "ms",
        "otherData": {
            "clock_offsets_us": {name: round(clock.offset, 1) for name, clock in clocks.items()},
            "clock_errors_us": {name: round(clock.error, 1) for name, clock in clocks.items()},
            "num_missed": trace.num_missed,
        },
    }


def _metadata(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _gateway(made: _Events, trace: Trace) -> None:
    made.process(
        GATEWAY,
        "gateway",
        {_MESSAGES: "messages of the scheduler", _WRITTEN: "tokens to clients", _REQUESTS: "requests"},
    )
    for one in trace.messages:
        made.slice(GATEWAY, _MESSAGES, "read", one["received_us"], one["ended_us"], {"news": one["num_tokens"]})
    for one in trace.written:
        made.slice(GATEWAY, _WRITTEN, "tokens", one["began_us"], one["ended_us"], {"tokens": one["num_tokens"]})
    for one in trace.requests:
        ended = one["ended_us"]
        began = ended - one["latency_s"] * 1e6
        spans = [(one["endpoint"], began, ended)]
        if one["ttft_s"] is not None:
            first = began + one["ttft_s"] * 1e6
            admitted = min(began + (one["queue_s"] or 0.0) * 1e6, first)
            spans += [("queued", began, admitted), ("prompt", admitted, first), ("output", first, ended)]
        shown = (
            "request_id",
            "answer_id",
            "tenant",
            "finish_reason",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
        )
        made.overlapping(GATEWAY, _REQUESTS, "request", spans, {name: one[name] for name in shown})


def _scheduler(made: _Events, scheduler: SchedulerRecords, pid: int, suffix: str) -> None:
    made.process(pid, f"scheduler{suffix}", {_CORE: "core", _EXCHANGES: "exchanges with the cache", _STEPS: "steps"})
    own = scheduler.clock.to_own
    for run in scheduler.runs:
        began, applied, ended = own(run["began_us"]), own(run["applied_us"]), own(run["ended_us"])
        made.slice(pid, _CORE, run["event"], began, applied)
        made.slice(
            pid, _CORE, "plan", applied, ended, {"messages": run["num_plans"], "exchanges": run["num_exchanges"]}
        )
    for one in scheduler.exchanges:
        sent, ended = own(one["sent_us"]), own(one["ended_us"])
        made.slice(pid, _EXCHANGES, "exchange", sent, ended, {"operations": one["num_ops"]})
    for step in scheduler.steps:
        planned, sent, ended = own(step["planned_us"]), own(step["sent_us"]), own(step["ended_us"])
        spans = [(f"step {step['step']}", planned, ended)]
        if sent > planned:
            spans.append(("waits for the cache", planned, sent))
        spans.append(("at the worker", sent, ended))
        made.overlapping(pid, _STEPS, "step", spans, _sizes(step))


def _in_flight(made: _Events, scheduler: SchedulerRecords, steps: list[Record], pid: int, name: str) -> None:
    own = scheduler.clock.to_own
    changes = sorted([(own(step["sent_us"]), 1) for step in steps] + [(own(step["ended_us"]), -1) for step in steps])
    plans = 0
    for at, change in changes:
        plans += change
        made.counter(pid, f"plans in flight, {name}", at, plans)


def _cache(made: _Events, scheduler: SchedulerRecords, clock: ClockOffset, pid: int, suffix: str) -> None:
    made.process(pid, f"cache{suffix}", {_COMPUTE: "exchanges", _LINK: "link to the scheduler"})
    own = scheduler.clock.to_own
    for one in scheduler.exchanges:
        if not one["received_us"]:
            continue
        received, answered = clock.to_own(one["received_us"]), clock.to_own(one["answered_us"])
        made.slice(pid, _COMPUTE, "apply", received, answered, {"operations": one["num_ops"]})
        made.overlapping(pid, _LINK, "link", [("exchange on its way", own(one["sent_us"]), received)])
        made.overlapping(pid, _LINK, "link", [("answer on its way", answered, own(one["ended_us"]))])


def _worker(
    made: _Events, scheduler: SchedulerRecords, steps: list[Record], clock: ClockOffset, pid: int, name: str
) -> None:
    made.process(pid, name, {_COMPUTE: "compute", _LINK: "link to the scheduler"})
    own = scheduler.clock.to_own
    for step in steps:
        if not step["received_us"]:
            continue
        received, started, finished, result = (
            clock.to_own(step[part]) for part in ("received_us", "started_us", "finished_us", "result_sent_us")
        )
        made.slice(pid, _COMPUTE, f"step {step['step']}", started, finished, _sizes(step))
        made.overlapping(pid, _LINK, "link", [("plan on its way", own(step["sent_us"]), received)])
        made.overlapping(pid, _LINK, "plan", [("plan waits", received, started)])
        made.overlapping(pid, _LINK, "result", [("result is made", finished, result)])
        made.overlapping(pid, _LINK, "link", [("result on its way", result, own(step["ended_us"]))])


def _sizes(step: Record) -> Event:
    return {name: step[name] for name in ("num_decodes", "num_prefills", "new_tokens", "context_tokens")}
