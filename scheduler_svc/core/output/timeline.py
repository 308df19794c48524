"""Why requests wait, for `paceline explain`: of all that are there, and of the last ones that have ended.

A decision costs what it names, not what waits: it notes the requests that it looked at and left out, or why it looked
at none. Whoever stood behind the first of those waited for their turn, which is told from the same notes when somebody
asks.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from scheduler_svc.core.requests.request import Request

MAX_ENDED = 4096
MAX_SPANS = 64  # of one request, and as many events
MAX_TOP_REJECTED = 4096
MAX_OUTAGES = 256
WAITING = ("waiting", "preempted", "requeued")
NOBODY: Mapping[str, int] = MappingProxyType({})


# Reason, detail, decision, time. A plain tuple: every request leaves three, and hardly one is ever asked for.
Event = tuple[str, str, int, float]


@dataclass(slots=True)
class Span:
    """One reason over consecutive decisions of a worker, or an event as it is told."""

    reason: str
    detail: str
    first: int
    last: int
    from_s: float
    to_s: float
    worker: int = 0


@dataclass(slots=True)
class Wait:
    """Decisions at which it stood in the queue, and from when until when."""

    first: int
    from_s: float
    last: int | None = None
    to_s: float = math.inf


@dataclass(slots=True)
class Record:
    request_id: str
    answer_id: str
    arrival_index: int
    arrival_s: float
    tenant: str
    # Lists, though only the last MAX_SPANS are kept: most records have a few, and an empty deque takes 600 bytes.
    events: list[Event]
    looks: list[Span] = field(default_factory=list)  # decisions that looked at it and left it out

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > MAX_SPANS:
            del self.events[0]

    def add_look(self, span: Span) -> None:
        self.looks.append(span)
        if len(self.looks) > MAX_SPANS:
            del self.looks[0]

    def told(self) -> list[Span]:
        return [Span(reason, detail, n, n, at_s, at_s) for reason, detail, n, at_s in self.events] + self.looks

    def waits(self) -> list[Wait]:
        """It has waited since each event that says so, up to the next one."""
        waits = list[Wait]()
        for reason, _, decision, at_s in self.events:
            if waits and waits[-1].last is None:
                # The decision that let it in is none at which it waited.
                waits[-1].last, waits[-1].to_s = decision - (reason == "running"), at_s
            if reason in WAITING:
                waits.append(Wait(decision, at_s))
        return waits


@dataclass(slots=True)
class TopRejected:
    """Who was first of those that a worker's decisions left out, as long as that and the reason were the same; 0 and ""
    if they looked at nobody."""

    arrival_index: int
    request_id: str
    span: Span


@dataclass(slots=True)
class AtLimit:
    """A tenant, at consecutive decisions of a worker that passed over what waits of it, since so much of it ran."""

    tenant: str
    tokens: int
    span: Span


@dataclass(slots=True)
class RequestTimeline:
    tenant_limit: int = 0  # tokens of one that may run
    decisions: int = 0
    # By arrival index. As many live requests as the queue and the workers take, and the last MAX_ENDED finished ones.
    _live: dict[int, Record] = field(default_factory=dict)
    _ended: OrderedDict[int, Record] = field(default_factory=OrderedDict)
    # Arrival indexes by request id and by answer id. Clients choose request ids, and two requests may have the same.
    _names: dict[str, dict[int, None]] = field(default_factory=dict)
    _tops: deque[TopRejected] = field(default_factory=lambda: deque(maxlen=MAX_TOP_REJECTED))
    _last: dict[int, tuple[int, TopRejected | None]] = field(
        default_factory=dict
    )  # each worker's last decision, and its head
    _limits: deque[AtLimit] = field(default_factory=lambda: deque(maxlen=MAX_TOP_REJECTED))
    _at_limit: dict[int, dict[str, AtLimit]] = field(default_factory=dict)  # by each worker's last decision; by tenant
    _outages: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_OUTAGES))

    def arrived(self, request: Request, now_s: float) -> None:
        arrival = ("waiting", f"{request.num_tokens} tokens", self.decisions, now_s)
        record = Record(request.request_id, request.answer_id, request.arrival_index, now_s, request.tenant, [arrival])
        self._live[request.arrival_index] = record
        for name in _names(record):
            self._names.setdefault(name, {})[request.arrival_index] = None

    def event(self, request: Request, reason: str, detail: str, now_s: float) -> None:
        """It waits, runs, was preempted."""
        record = self._live.get(request.arrival_index)
        if record is not None:
            record.add_event((reason, detail, self.decisions, now_s))

    def ended(self, request: Request, how: str, now_s: float) -> None:
        """From now on it may be forgotten."""
        record = self._live.pop(request.arrival_index, None)
        if record is None:
            return
        record.add_event(("ended", how, self.decisions, now_s))
        self._ended[record.arrival_index] = record
        for name in _names(record):  # finished ones stand in the order in which they finished
            self._names[name].pop(record.arrival_index)
            self._names[name][record.arrival_index] = None
        if len(self._ended) > MAX_ENDED:
            self._forget(self._ended.popitem(last=False)[1])

    def _forget(self, record: Record) -> None:
        for name in _names(record):
            indexes = self._names[name]
            del indexes[record.arrival_index]
            if not indexes:
                del self._names[name]

    def decided(
        self,
        worker: int,
        rejected: Sequence[tuple[Request, str, str]],
        closed: tuple[str, str] | None,
        now_s: float,
        at_limit: Mapping[str, int] = NOBODY,
        without_grammar: Sequence[Request] = (),
    ) -> None:
        """A decision for a worker looked at these and left them out, the first one first; or it is `closed` (reason,
        detail), and looked at nobody. `at_limit`: the tenants that it passed over, and how many tokens of them run.
        `without_grammar`: the requests whose grammar the worker has still to prepare."""
        self.decisions += 1
        self._passed_over(worker, at_limit, now_s)
        before, top = self._last.get(worker, (0, None))
        preparing = ((request, "grammar", "the worker prepares it") for request in without_grammar)
        for request, reason, detail in itertools.chain(rejected, preparing):
            known = request if request.group is None else request.group.root
            record = self._live.get(known.arrival_index)
            if record is not None:
                self._extend(record, worker, reason, detail, before, now_s)
        if not (rejected or closed):
            self._last[worker] = self.decisions, None
            return
        if rejected:
            (request, reason, _), detail = rejected[0], ""
            known = request if request.group is None else request.group.root
            arrival_index, name = known.arrival_index, known.request_id
        else:
            assert closed is not None
            arrival_index, name, (reason, detail) = 0, "", closed
        if top is None or (top.arrival_index, top.span.reason) != (arrival_index, reason):
            top = TopRejected(
                arrival_index, name, Span(reason, detail, self.decisions, self.decisions, now_s, now_s, worker)
            )
            self._tops.append(top)
        top.span.detail, top.span.last, top.span.to_s = detail, self.decisions, now_s
        self._last[worker] = self.decisions, top

    def _passed_over(self, worker: int, at_limit: Mapping[str, int], now_s: float) -> None:
        if not (at_limit or worker in self._at_limit):
            return
        before = self._at_limit.pop(worker, {})
        if not at_limit:
            return
        now = self._at_limit[worker] = {tenant: before[tenant] for tenant in at_limit if tenant in before}
        for tenant, tokens in at_limit.items():
            if (one := now.get(tenant)) is None:
                span = Span("tenant", "", self.decisions, self.decisions, now_s, now_s, worker)
                one = now[tenant] = AtLimit(tenant, tokens, span)
                self._limits.append(one)
            one.tokens, one.span.last, one.span.to_s = tokens, self.decisions, now_s

    def worker_gone(self, worker: int) -> None:
        self._last.pop(worker, None)
        self._at_limit.pop(worker, None)

    def out(self, reason: str, detail: str, now_s: float) -> None:
        """From now on nothing can be decided for this reason; or if there is none, decisions go on."""
        outage = self._outages[-1] if self._outages and self._outages[-1].to_s == math.inf else None
        if outage is not None and outage.reason != reason:
            outage.last, outage.to_s, outage = self.decisions, now_s, None
        if outage is None and reason:
            self._outages.append(Span(reason, detail, self.decisions, self.decisions, now_s, math.inf))

    def find(self, name: str) -> list[Record]:
        """The sequences that an id stands for, by arrival; empty if none is known.

        The id of an answer stands for all its sequences. A request id stands for the sequence that has it, and for
        those of the same answer whose ids continue it (`x-1`: another prompt of request x, `x.1`: another sample). Of
        several sequences with the same request id: the last live one, else the last one that finished.
        """
        known = self._named(name)
        if of_answer := [record for record in known.values() if record.answer_id == name]:
            return of_answer
        record = known.get(name)
        if record is None or not record.answer_id:
            return [] if record is None else [record]
        continued = (f"{name}.", f"{name}-")
        others = self._named(record.answer_id).values()
        return [record, *(other for other in others if other.request_id.startswith(continued))]

    def _named(self, name: str) -> dict[str, Record]:
        """By request id, what has this request id or answer id."""
        found: dict[str, Record] = {}
        for index in self._names.get(name, ()):
            record = self._live.get(index) or self._ended[index]
            before = found.get(record.request_id)
            if before is None or index in self._live or before.arrival_index not in self._live:
                found[record.request_id] = record
        return dict(sorted(found.items(), key=lambda item: item[1].arrival_index))

    def explain(self, name: str, now_s: float) -> list[Span] | None:
        """Why the (first) sequence that this id stands for waited; None if nothing is known of it."""
        found = self.find(name)
        return self.explain_record(found[0], now_s) if found else None

    def explain_record(self, record: Record, now_s: float) -> list[Span]:
        """Oldest first, times in seconds since the arrival."""
        spans = record.told()
        for wait in record.waits():
            spans += self._turns(record, wait)
            wait.to_s = min(wait.to_s, now_s)
            for out in self._outages:
                if out.from_s < wait.to_s and wait.from_s < out.to_s:
                    from_s, to_s = max(out.from_s, wait.from_s), min(out.to_s, wait.to_s)
                    spans.append(Span(out.reason, out.detail, max(out.first, wait.first), out.last, from_s, to_s))
        spans.sort(key=lambda span: (span.from_s, span.first))
        spans = _joined(spans)
        return [replace(s, from_s=s.from_s - record.arrival_s, to_s=s.to_s - record.arrival_s) for s in spans]

    def _turns(self, record: Record, wait: Wait) -> list[Span]:
        """While it waited and was not looked at: too much of its tenant ran, or who stood before it, and what that one
        waited for; or why nobody was looked at."""
        last = self.decisions if wait.last is None else wait.last
        told, looks = list[Span](), Apart(record.looks)
        for limit in self._limits:
            if limit.tenant == record.tenant:
                detail = f"{limit.tokens} tokens of tenant {limit.tenant!r} run, its limit is {self.tenant_limit}"
                told += looks.parts(replace(limit.span, detail=detail), wait, last)
        apart = Apart([*record.looks, *told])
        for one in self._tops:
            top = one.span
            if one.arrival_index == record.arrival_index or top.last <= wait.first or top.first > last:
                continue
            if one.request_id:
                top = replace(top, reason="order", detail=f"behind {one.request_id}, which waits for {top.reason}")
            told += apart.parts(top, wait, last)
        return told

    def _extend(self, record: Record, worker: int, reason: str, detail: str, before: int, now_s: float) -> None:
        """`before`: the number of the worker's decision before this one. What others decided in between does not end
        a range, but what became of the request does."""
        last = next((span for span in reversed(record.looks) if span.worker == worker), None)
        since = max(before, record.events[-1][2])
        if last is not None and last.reason == reason and last.last >= since:
            last.last, last.to_s, last.detail = self.decisions, now_s, detail
        else:
            record.add_look(Span(reason, detail, self.decisions, self.decisions, now_s, now_s, worker))


def _names(record: Record) -> set[str]:
    """What it can be found by."""
    return {name for name in (record.request_id, record.answer_id) if name}


class Apart:
    """Ranges that tell of a request already, to be left out of others; those of one worker do not overlap."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._of: dict[int, list[Span]] = {}  # by worker, in order
        for span in sorted(spans, key=lambda span: span.first):
            self._of.setdefault(span.worker, []).append(span)

    def parts(self, span: Span, wait: Wait, last: int) -> list[Span]:
        """What is left of the span in the wait, up to that decision."""
        told, parts = self._of.get(span.worker, []), list[Span]()
        first, last, from_s = max(span.first, wait.first + 1), min(span.last, last), max(span.from_s, wait.from_s)
        for one in itertools.islice(told, bisect_left(told, first, key=lambda one: one.last), None):
            if one.first > last:
                break
            if first < one.first:
                parts.append(replace(span, first=first, last=one.first - 1, from_s=from_s, to_s=one.from_s))
            first, from_s = one.last + 1, one.to_s
        if first <= last:
            parts.append(replace(span, first=first, last=last, from_s=from_s, to_s=min(span.to_s, wait.to_s)))
        return parts


def _joined(spans: list[Span]) -> list[Span]:
    """Ranges of several workers that tell the same, and meet, as one."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else span
        tells_the_same = (last.reason, last.detail) == (span.reason, span.detail)
        if joined and tells_the_same and span.first <= last.last + 1:
            worker = span.worker if span.worker == last.worker else 0
            end, to_s = max(last.last, span.last), max(last.to_s, span.to_s)
            joined[-1] = replace(last, last=end, to_s=to_s, worker=worker)
        else:
            joined.append(span)
    return joined
