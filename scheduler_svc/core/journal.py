"""Why requests wait, for `paceline explain`: of all that are there, and of the last ones that have ended.

A decision costs what it names, not what waits: it notes the requests that it looked at and left out, or why it looked
at none. Whoever stood behind the first of those waited for their turn, which is told from the same notes when somebody
asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
class Head:
    """Who was first of those that a worker's decisions left out, as long as that and the reason were the same; "" if
    they looked at nobody."""

    request_id: str
    span: Span


@dataclass(slots=True)
class Journal:
    decisions: int = 0
    _live: dict[int, Record] = field(default_factory=dict)  # by seniority; as many as the queue and the workers take
    _ids: dict[str, list[int]] = field(default_factory=dict)  # of these; clients choose them, and two may be the same
    _ended: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    _heads: deque[Head] = field(default_factory=lambda: deque(maxlen=MAX_HEADS))
    _last: dict[int, tuple[int, Head | None]] = field(default_factory=dict)  # each worker's last decision, and its head

    def arrived(self, request: Request, now_s: float) -> None:
        arrival = ("waiting", f"{request.num_tokens} tokens", self.decisions, now_s)
        self._live[request.seniority] = Record(request.request_id, now_s, [arrival])
        self._ids.setdefault(request.request_id, []).append(request.seniority)

    def event(self, request: Request, reason: str, detail: str, now_s: float) -> None:
        """It waits, runs, was preempted."""
        record = self._live.get(request.seniority)
        if record is not None:
            record.add((reason, detail, self.decisions, now_s))

    def ended(self, request: Request, how: str, now_s: float) -> None:
        """From now on it may be forgotten."""
        record = self._live.pop(request.seniority, None)
        if record is None:
            return
        name = request.request_id
        self._ids[name].remove(request.seniority)
        if not self._ids[name]:
            del self._ids[name]
        record.add(("ended", how, self.decisions, now_s))
        self._ended.pop(name, None)
        self._ended[name] = record
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def decided(
        self, worker: int, held_back: Sequence[tuple[Request, str, str]], closed: tuple[str, str] | None, now_s: float
    ) -> None:
        """A decision for a worker looked at these and left them out, the first one first; or it is `closed` (reason,
        detail), and looked at nobody."""
        self.decisions += 1
        before, head = self._last.get(worker, (0, None))
        for request, reason, detail in held_back:
            known = request if request.group is None else request.group.root
            record = self._live.get(known.seniority)
            if record is not None:
                self._extend(record, reason, detail, before, now_s)
        if not (held_back or closed):
            self._last[worker] = self.decisions, None
            return
        if held_back:
            (request, reason, _), detail = held_back[0], ""
            name = request.request_id
        else:
            assert closed is not None
            name, (reason, detail) = "", closed
        if head is None or (head.request_id, head.span.reason) != (name, reason):
            head = Head(name, Span(reason, detail, self.decisions, self.decisions, now_s, now_s))
            self._heads.append(head)
        head.span.detail, head.span.last, head.span.to_s = detail, self.decisions, now_s
        self._last[worker] = self.decisions, head

    def worker_gone(self, worker: int) -> None:
        self._last.pop(worker, None)

    def explain(self, request_id: str) -> list[Span] | None:
        """Oldest first, times in seconds since the arrival; None if nothing is known of it. Of several that have the
        id, the last one that is there, else the last one that has ended."""
        live = self._ids.get(request_id)
        record = self._live[live[-1]] if live else self._ended.get(request_id)
        if record is None:
            return None
        spans = record.told()
        for wait in record.waits():
            spans += self._turns(record, wait)
        spans.sort(key=lambda span: (span.from_s, span.first))
        spans = _joined(spans)
        return [
            Span(s.reason, s.detail, s.first, s.last, s.from_s - record.arrival_s, s.to_s - record.arrival_s)
            for s in spans
        ]

    def _turns(self, record: Record, wait: Wait) -> list[Span]:
        """While it waited: who stood before it, and what that one waited for; or why nobody was looked at."""
        turns = []
        first, last = wait.first, self.decisions if wait.last is None else wait.last
        for one in self._heads:
            head = one.span
            if head.last <= first or head.first > last or one.request_id == record.request_id:
                continue
            looked_at = (span for span in record.spans if isinstance(span, Span))
            if any(span.first <= head.first and span.last >= head.last for span in looked_at):
                continue  # it was looked at itself
            reason, detail = head.reason, head.detail
            if one.request_id:
                reason, detail = "order", f"behind {one.request_id}, which waits for {head.reason}"
            from_s, to_s = max(head.from_s, record.arrival_s), min(head.to_s, wait.to_s)
            turns.append(Span(reason, detail, max(head.first, first + 1), min(head.last, last), from_s, to_s))
        return turns

    def _extend(self, record: Record, reason: str, detail: str, before: int, now_s: float) -> None:
        """`before`: the number of the worker's decision before this one. What others decided in between does not end
        a range."""
        last = record.spans[-1] if record.spans else None
        if isinstance(last, Span) and last.reason == reason and last.last >= before:
            last.last, last.to_s, last.detail = self.decisions, now_s, detail
        else:
            record.add(Span(reason, detail, self.decisions, self.decisions, now_s, now_s))


def _joined(spans: list[Span]) -> list[Span]:
    """Ranges of several workers that tell the same, and meet, as one."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else span
        tells_the_same = (last.reason, last.detail) == (span.reason, span.detail)
        if joined and tells_the_same and span.first <= last.last + 1:
            joined[-1] = replace(last, last=max(last.last, span.last), to_s=max(last.to_s, span.to_s))
        else:
            joined.append(span)
    return joined
