"""Server-sent events, as a client takes them apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Event(NamedTuple):
    id: str
    data: str


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """Whole events only: what is not closed by an empty line has not arrived. An answer that is no stream is one."""
    fields: dict[str, str] = {}
    lines = list(lines)
    if len(lines) == 1:
        yield Event("", lines[0])
        return
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            assert name in ("id", "data"), line
            assert name not in fields, fields
            fields[name] = value
        elif fields:
            yield Event(fields.get("id", ""), fields["data"])
            fields = {}
