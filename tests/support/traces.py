"""Checks that a trace is one that Perfetto shows correctly."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

ROUNDED_US = 0.2  # times have one decimal place
PHASES = {"X": {"ts", "dur"}, "b": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"}, "C": {"ts", "args"}, "M": {"args"}}


def check_trace(content: dict[str, Any]) -> None:
    """Raises AssertionError if a field is missing, times are out of order, or events of one track do not nest."""
    events = content["traceEvents"]
    for event in events:
        assert {"name", "pid", "tid", *PHASES[event["ph"]]} <= event.keys(), event
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["pid"] for event in timed} <= processes
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in timed)
    ended: dict[tuple[int, int], float] = defaultdict(float)
    opened: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= ended[track] - ROUNDED_US, f"two at once on one track: {event}"
            ended[track] = event["ts"] + event["dur"]
        elif event["ph"] == "b":
            opened[event["cat"], event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert opened[event["cat"], event["id"]].pop() == event["name"], event
    assert not any(opened.values())


def computed_within_steps(content: dict[str, Any]) -> int:
    """How many computations of workers the trace has. Raises AssertionError if one of them does not lie between the
    plan's departure from the scheduler and the result's arrival there."""
    events = content["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    begun: dict[str, dict[str, float]] = defaultdict(dict)
    for event in events:
        if event.get("cat") != "step":
            continue
        if event["ph"] == "b":
            begun[event["id"]][event["name"]] = event["ts"]
        elif event["name"] == "at the worker":
            first = next(iter(begun[event["id"]]))  # "step 5"
            spans[first].append((begun[event["id"]]["at the worker"], event["ts"]))
    computed = [event for event in events if event["ph"] == "X" and names[event["pid"]].startswith("worker")]
    for event in computed:
        end = event["ts"] + event["dur"]
        assert any(a <= event["ts"] + ROUNDED_US and end <= b + ROUNDED_US for a, b in spans[event["name"]]), event
    return len(computed)
