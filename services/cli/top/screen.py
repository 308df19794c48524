"""Fits a snapshot into a terminal of any size, or into plain text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from services.cli.arguments import plain
from services.cli.top.bars import duration
from services.cli.top.lines import BAD, DIM, TITLE, Choice, Lines

HELP = "q quit   ↑ ↓ choose   tab workers/tenants   p pause"
# A short terminal shows at least so many lines of a table.
LEAST_ROWS = 2
MOST_STEPS = 12
PLAIN_STEPS = 5
PLAIN_SPACE = Text("")


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the first lines say about the server and the connection."""

    url: str
    paused: bool = False
    trouble: str = ""  # why there is no connection
    away_s: float = 0.0  # for how long there has been no connection
    back_after_s: float = 0.0  # the connection has just come back after so long; 0: it has not


def headline(snapshot: dict[str, Any], status: ServerState) -> list[Text]:
    """The server and its state, and what is wrong with the connection."""
    gateway = snapshot["gateway"]
    state = "draining" if gateway["draining"] else "ready" if gateway["ready"] else "not ready"
    line = Text.assemble(
        ("paceline top  ", TITLE),
        ("PAUSED  " if status.paused else "", "bold yellow"),
        (state, "green" if state == "ready" else BAD),
        f"  {time.strftime('%H:%M:%S', time.localtime(snapshot['at_s']))}  {gateway['live_requests']} live requests  ",
        (plain(gateway["model"]), "bold"),
        f" at {plain(status.url)}",
    )
    if status.trouble:
        what = f"no connection for {duration(status.away_s)}, trying again: {plain(status.trouble)}"
        return [line, Text(what, BAD)]
    if status.back_after_s:
        return [line, Text(f"connected again after {duration(status.back_after_s)}", "bold green")]
    return [line]


def full(lines: Lines, status: ServerState) -> list[Text]:
    """All that is known, for a file, a pipe or `--once`."""
    found = [*headline(lines.snapshot, status), *lines.overview(), PLAIN_SPACE, *lines.latencies()]
    if lines.snapshot["scheduler"] is not None:
        for section in (lines.policies(), lines.workers(), lines.tenants(), lines.steps(PLAIN_STEPS)):
            found += [PLAIN_SPACE, *section] if section else []
    services = lines.services()
    return found + ([PLAIN_SPACE, *services] if services else [])


def fitted(lines: Lines, status: ServerState, height: int) -> list[Text]:
    """At most `height` lines. What matters most comes first: the state, the queue, latencies; then workers, tenants and
    steps."""
    space = height - 1  # the keys, at the end
    found = [*headline(lines.snapshot, status), *lines.overview()]
    sections = [lines.latencies()]
    tables: list[list[Text]] = []
    if lines.snapshot["scheduler"] is not None:
        sections.append(lines.policies())
        tables = [lines.workers() + lines.chosen(), lines.tenants()]
        if lines.choice is not None and lines.choice.kind == "tenant":
            tables = [lines.workers(), lines.tenants() + lines.chosen()]
    sections.append(lines.services())
    space -= len(found) + sum(len(section) for section in sections)
    for table in tables:  # reserve LEAST_ROWS lines for each, so that no table takes all the room
        space -= min(len(table), LEAST_ROWS)
    for section in sections:
        found += section
    for number, table in enumerate(tables):
        if not table:
            continue
        room = min(len(table), LEAST_ROWS) + max(space, 0)
        if number == 0:  # the last steps get some lines, too
            room = max(room - max(space, 0) // 3, LEAST_ROWS)
        shown = scrolled(table, room, lines.choice)
        space -= len(shown) - min(len(table), LEAST_ROWS)
        found += shown
    if tables and space > LEAST_ROWS:
        found += lines.steps(min(space - 1, MOST_STEPS))
    return [*found[: max(height - 1, 1)], Text(HELP, DIM)][:height]


def scrolled(table: Sequence[Text], room: int, choice: Choice | None) -> list[Text]:
    """The table, cut to `room` lines if it has more (3 at least: title, one row, number of hidden rows). The chosen row
    stays visible."""
    if len(table) <= room:
        return list(table)
    title, *rows = table
    room = max(room - 2, 1)
    at = next((i for i, row in enumerate(rows) if row.plain.startswith(">")), 0) if choice is not None else 0
    first = min(max(at - room // 2, 0), len(rows) - room)
    hidden = len(rows) - room
    return [title, *rows[first : first + room], Text(f"  … {hidden} more lines", DIM)]


def group(lines: Sequence[Text]) -> Group:
    """The lines, each cut at the edge of the terminal."""
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)
