"""The unit of load: a session of one or more turns, each of which is one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """A part of a prompt. Segments of the same key and length have the same text."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request. The prompt is the system prompt and these segments. Between them are the earlier turns with their
    replies, if the session keeps its history and prompts are text."""

    segments: tuple[Segment, ...]
    output_tokens: int
    # Seconds between the end of the turn before and this request: a human's think time, or a tool that runs.
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSession:
    """Turns that run one after another, behind a system prompt that other sessions may share."""

    turns: tuple[SessionTurn, ...]
    system: tuple[Segment, ...] = ()
    kind: str = "random"
    # Whether a turn's prompt begins with the turns and replies before it.
    keeps_history: bool = True


class TimedSession(NamedTuple):
    """A session with the time of its start, in seconds."""

    at_s: float
    session: LoadSession
