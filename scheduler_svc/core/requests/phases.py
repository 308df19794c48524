"""The phases of a sequence, and the events that lead from one to another. docs/architecture.md has the table."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The phase of a sequence. The value says what it means."""

    WAITING = "in the queue"
    ALLOCATING = "in a step that waits for the cache's answer"
    RUNNING = "in a slot of one worker, with blocks"
    PARKED = "a beam without a slot that keeps its blocks, as other beams fork from it"
    ENDED = "over; it holds nothing"


class Event(enum.Enum):
    """What moves a sequence to another phase. The value says what happens."""

    SCHEDULE = "a step takes it"
    GRANT = "the cache grants its blocks, and its plan is emitted"
    REJECT = "the cache has too few blocks, or is lost before it answers"
    PREEMPT = "it gives its slot to other sequences"
    LOSE = "its worker or its blocks are lost"
    PARK = "it is a beam and has run its token"
    END = "stop, length, abort, error, deadline; or no beam forks from it any more"


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.WAITING, Event.SCHEDULE): Phase.ALLOCATING,
    (Phase.WAITING, Event.END): Phase.ENDED,
    (Phase.ALLOCATING, Event.GRANT): Phase.RUNNING,
    (Phase.ALLOCATING, Event.REJECT): Phase.WAITING,
    (Phase.ALLOCATING, Event.LOSE): Phase.WAITING,
    (Phase.ALLOCATING, Event.END): Phase.ENDED,
    (Phase.RUNNING, Event.PREEMPT): Phase.WAITING,
    (Phase.RUNNING, Event.LOSE): Phase.WAITING,
    (Phase.RUNNING, Event.PARK): Phase.PARKED,
    (Phase.RUNNING, Event.END): Phase.ENDED,
    (Phase.PARKED, Event.LOSE): Phase.ENDED,
    (Phase.PARKED, Event.END): Phase.ENDED,
}


def table() -> str:
    """The transitions as a Markdown table: a row for each phase, a column for each event."""
    columns = [event.name for event in Event]
    rows = [["phase", "meaning", *columns], ["---"] * (2 + len(columns))]
    for phase in Phase:
        following = (TRANSITIONS.get((phase, event)) for event in Event)
        rows.append([phase.name, phase.value, *(after.name if after else "" for after in following)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"- `{event.name}`: {event.value}" for event in Event)])
