"""Why requests wait, for `paceline explain`: of all that are there, and of the last ones that have ended.

A decision costs what it names, not what waits: it notes the requests that it looked at and left out. Whoever stood
behind the first of those waited for their turn, which is told from the same notes when somebody asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.request import Request

MAX_ENDED = 4096
MAX_SPANS = 64  # of one request
MAX_HEADS = 4096
WAITING = ("waiting", "preempted", "requeued")


# Reason, detail, decision, time. A plain tuple: every request leaves three, and hardly one is ever asked for.
Event = tuple[str, str, int, float]


@dataclass(slots=True)
class Span:
    """One reason over consecutive decisions, or an event as it is told."""

    reason: str
    detail: str
    first: int
    last: int
    from_s: float
    to_s: float


@dataclass(slots=True)
class Wait:
    """Decisions at which it stood in the queue, and until when."""

    first: int
    last: int | None = None
    to_s: float = math.inf


@dataclass(slots=True)
class Record:
    request_id: str
    seniority: int  # clients choose the ids, and two requests may have the same
    arrival_s: float
    # A list, though only the last MAX_SPANS are kept: most records have a few, and an empty deque takes 600 bytes.
    spans: list[Event | Span]

    def add(self, span: Event | Span) -> None:
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            del self.spans[0]

    def told(self) -> list[Span]:
        return [Span(s[0], s[1], s[2], s[2], s[3], s[3]) if isinstance(s, tuple) else s for s in self.spans]

    def waits(self) -> list[Wait]:
        """It has waited since each event that says so, up to the next one; or, if that is not kept any more, since
        the first thing that is known of it."""
        first = self.spans[0]
        waits = [Wait(first.first)] if isinstance(first, Span) else []
        for reason, _, decision, at_s in (span for span in self.spans if isinstance(span, tuple)):
            if waits and waits[-1].last is None:
                # The decision that let it in is none at which it waited.
                waits[-1].last, waits[-1].to_s = decision - (reason == "running"), at_s
            if reason in WAITING:
                waits.append(Wait(decision))
        return waits


@dataclass(slots=True)
class Journal:
    decisions: int = 0
    _live: dict[str, Record] = field(default_factory=dict)  # as many as the queue and the workers take
    _ended: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    _heads: deque[tuple[str, Span]] = field(default_factory=lambda: deque(maxlen=MAX_HEADS))

    def arrived(self, request: Request, now_s: float) -> None:
        arrival = ("waiting", f"{request.num_tokens} tokens", self.decisions, now_s)
        self._live[request.request_id] = Record(request.request_id, request.seniority, now_s, [arrival])

    def event(self, request: Request, reason: str, detail: str, now_s: float) -> None:
        """It waits, runs, was preempted."""
        record = self._of(request)
        if record is not None:
            record.add((reason, detail, self.decisions, now_s))

    def ended(self, request: Request, how: str, now_s: float) -> None:
        """From now on it may be forgotten."""
        record = self._of(request)
        if record is None:
            return
        record.add(("ended", how, self.decisions, now_s))
        del self._live[request.request_id]
        self._ended.pop(request.request_id, None)
        self._ended[request.request_id] = record
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _of(self, request: Request) -> Record | None:
        """None if a later request has taken its id."""
        record = self._live.get(request.request_id)
        return record if record is not None and record.seniority == request.seniority else None

    def decided(self, held_back: Sequence[tuple[Request, str, str]], now_s: float) -> None:
        """A decision looked at these and left them out, the first one first."""
        self.decisions += 1
        for request, reason, detail in held_back:
            record = self._of(request)
            if record is not None:
                self._extend(record, reason, detail, now_s)
        if held_back:
            request, reason, _ = held_back[0]
            if self._heads and self._heads[-1][0] == request.request_id and self._heads[-1][1].reason == reason:
                self._heads[-1][1].last, self._heads[-1][1].to_s = self.decisions, now_s
            else:
                span = Span(reason, "", self.decisions, self.decisions, now_s, now_s)
                self._heads.append((request.request_id, span))

    def explain(self, request_id: str) -> list[Span] | None:
        """Oldest first, times in seconds since the arrival; None if nothing is known of it. Of several that have the
        id, the last one that is there, else the last one that has ended."""
        record = self._live.get(request_id) or self._ended.get(request_id)
        if record is None:
            return None
        spans = record.told()
        for wait in record.waits():
            spans += self._turns(record, wait)
        spans.sort(key=lambda span: (span.from_s, span.first))
        return [
            Span(s.reason, s.detail, s.first, s.last, s.from_s - record.arrival_s, s.to_s - record.arrival_s)
            for s in spans
        ]

    def _turns(self, record: Record, wait: Wait) -> list[Span]:
        """While it waited: who stood before it, and what that one waited for."""
        turns = []
        first, last = wait.first, self.decisions if wait.last is None else wait.last
        for request_id, head in self._heads:
            if head.last <= first or head.first > last or request_id == record.request_id:
                continue
            looked_at = (span for span in record.spans if isinstance(span, Span))
            if any(span.first <= head.first and span.last >= head.last for span in looked_at):
                continue  # it was looked at itself
            detail = f"behind {request_id}, which waits for {head.reason}"
            from_s, to_s = max(head.from_s, record.arrival_s), min(head.to_s, wait.to_s)
            turns.append(Span("order", detail, max(head.first, first + 1), min(head.last, last), from_s, to_s))
        return turns

    def _extend(self, record: Record, reason: str, detail: str, now_s: float) -> None:
        last = record.spans[-1] if record.spans else None
        if isinstance(last, Span) and last.reason == reason and last.last == self.decisions - 1:
            last.last, last.to_s, last.detail = self.decisions, now_s, detail
        else:
            record.add(Span(reason, detail, self.decisions, self.decisions, now_s, now_s))
