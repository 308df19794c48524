"""What a trace contains of the gateway. Items are recorded only while a trace runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from services.gateway.outcome import SequenceOutcome

MAX_KEPT = 16_384  # of each kind, between two takes
# Tokens that go to clients with less time between them are one item.
_TOGETHER_US = 500


def now_us() -> int:
    """The time of a trace's items, in microseconds on this machine's monotonic clock."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class SchedulerMessage:
    """A message of the scheduler, from its arrival until its tokens were handed to their requests."""

    received_us: int
    ended_us: int
    num_tokens: int


@dataclass(slots=True)
class Written:
    """Tokens that left for clients, from the first to the last of a group."""

    began_us: int
    ended_us: int
    num_tokens: int


@dataclass(slots=True)
class Ended:
    """A sequence that has ended."""

    ended_us: int
    outcome: SequenceOutcome


@dataclass(slots=True)
class TraceItems:
    """Items of all kinds, each kind in order."""

    messages: list[SchedulerMessage]
    written: list[Written]
    ended: list[Ended]


class GatewayTraceLog:
    """The items of one trace at a time."""

    def __init__(self) -> None:
        self.recording = False
        self._messages: deque[SchedulerMessage] = deque(maxlen=MAX_KEPT)
        self._written: deque[Written] = deque(maxlen=MAX_KEPT)
        self._ended: deque[Ended] = deque(maxlen=MAX_KEPT)

    # `message`, `tokens` and `ended` are called only while `recording`.

    def message(self, received_us: int, num_tokens: int) -> None:
        self._messages.append(SchedulerMessage(received_us, now_us(), num_tokens))

    def tokens(self, num_tokens: int) -> None:
        """Record that this many tokens go to a client now."""
        at_us = now_us()
        if self._written and at_us - self._written[-1].ended_us < _TOGETHER_US:
            last = self._written[-1]
            last.ended_us, last.num_tokens = at_us, last.num_tokens + num_tokens
        else:
            self._written.append(Written(at_us, at_us, num_tokens))

    def ended(self, outcome: SequenceOutcome) -> None:
        self._ended.append(Ended(now_us(), outcome))

    def start(self) -> None:
        """Records items from now on. Only one trace at a time."""
        self.recording = True

    def stop(self) -> None:
        """Records no more items, and drops those that were not taken."""
        self.recording = False
        self.take()

    def take(self) -> TraceItems:
        """The items since the last take. The oldest are missing if there were too many."""
        taken = TraceItems(list(self._messages), list(self._written), list(self._ended))
        self._messages.clear()
        self._written.clear()
        self._ended.clear()
        return taken
