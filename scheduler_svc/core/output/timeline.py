"""Why requests wait, for `paceline explain`. Knows every live request and the last MAX_ENDED finished ones.

A decision notes the requests that it rejected, or why it looked at none; also the tenants that it skipped, and the
requests without a prepared grammar. Other waiting requests cost nothing. The requests behind the first rejected one
waited for their turn: `explain` derives that from the same notes.
"""

from __future__ import annotations

import itertools
import math
import sys
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from scheduler_svc.core.output.prefix_use import PrefixUse
from scheduler_svc.core.requests.request import Request

MAX_ENDED = 4096
MAX_SPANS = 64  # a record keeps at most this many events, and this many entries of `looks`
MAX_TOP_REJECTED = 4096
MAX_OUTAGES = 256
WAITING = ("waiting", "preempted", "requeued")
BEAMS = "its beams"  # detail of the event "running" of a beam search

# Reason, detail, decision, time. A plain tuple: every request leaves three of them, and few are ever read.
Event = tuple[str, str, int, float]


@dataclass(slots=True)
class Span:
    """One reason over consecutive decisions of a worker, or an event."""

    reason: str
    detail: str
    first: int
    last: int
    from_s: float
    to_s: float
    worker: int = 0
    behind: str = ""  # the id of the request that it waited for


@dataclass(slots=True)
class Wait:
    """A range of decisions at which the request waited in the queue, and its times."""

    first: int
    from_s: float
    last: int = sys.maxsize
    to_s: float = math.inf


@dataclass(slots=True)
class Record:
    """The timeline of one request."""

    request_id: str
    answer_id: str
    arrival_index: int
    arrival_s: float
    tenant: str
    key: str  # the name of the API key, "" without one
    # Lists, though only the last MAX_SPANS are kept: most records have few entries, and an empty deque takes 760 bytes.
    events: list[Event]
    looks: list[Span] = field(default_factory=list)  # decisions that looked at the request and rejected it
    prefix: PrefixUse | None = None  # None before the first admission, and without prefix caching

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        del self.events[:-MAX_SPANS]

    def waits(self) -> list[Wait]:
        """The request waits from each event that says so to the next event."""
        waits = list[Wait]()
        for reason, _, decision, at_s in self.events:
            if waits and waits[-1].to_s == math.inf:
                # The request did not wait at the decision that admitted it.
                waits[-1].last, waits[-1].to_s = decision - (reason == "running"), at_s
            if reason in WAITING:
                waits.append(Wait(decision, at_s))
        return waits


class SeveralOwners(Exception):
    """An id stands for requests of several tenants or API keys. `owners`: tenant and key of each, sorted."""

    def __init__(self, owners: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.owners = owners


@dataclass(slots=True)
class TopRejected:
    """The first request that a worker's decisions rejected, as long as the request and the reason stayed the same."""

    arrival_index: int  # 0 if the decisions looked at no request
    request_id: str
    span: Span


@dataclass(slots=True)
class AtLimit:
    """A tenant that consecutive decisions of a worker skipped, because it was at its limit of running tokens."""

    tenant: str
    tokens: int
    span: Span


@dataclass(slots=True)
class RequestTimeline:
    """The records of all live requests and of the last finished ones."""

    tenant_limit: int = 0  # running tokens of one tenant
    decisions: int = 0
    # By arrival index. As many live requests as the queue and the workers take, and the last MAX_ENDED finished ones.
    _live: dict[int, Record] = field(default_factory=dict)
    _ended: OrderedDict[int, Record] = field(default_factory=OrderedDict)
    # Arrival indexes by request id and by answer id. Clients choose request ids, and two requests may have the same.
    _names: dict[str, dict[int, None]] = field(default_factory=dict)
    _tops: deque[TopRejected] = field(default_factory=lambda: deque(maxlen=MAX_TOP_REJECTED))
    _last: dict[int, tuple[int, TopRejected | None]] = field(default_factory=dict)  # each worker's last decision
    _limits: deque[AtLimit] = field(default_factory=lambda: deque(maxlen=MAX_TOP_REJECTED))
    _at_limit: dict[int, dict[str, AtLimit]] = field(default_factory=dict)  # at each worker's last decision
    _outages: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_OUTAGES))

    def arrived(self, request: Request, now_s: float) -> None:
        detail = f"{request.num_tokens} tokens{', offline' if request.metadata.offline else ''}"
        arrival = ("waiting", detail, self.decisions, now_s)
        names = (request.request_id, request.metadata.answer_id)
        record = Record(
            *names, request.arrival_index, now_s, request.metadata.tenant, request.metadata.owner, [arrival]
        )
        self._live[request.arrival_index] = record
        for name in _names(record):
            self._names.setdefault(name, {})[request.arrival_index] = None

    def event(self, request: Request, reason: str, detail: str, now_s: float) -> None:
        """Note an event: the request waits, runs, was preempted."""
        if (record := self._live.get(request.arrival_index)) is not None:
            record.add_event((reason, detail, self.decisions, now_s))

    def found(self, request: Request, prefix: PrefixUse) -> None:
        """Note what the first admission found in the prefix cache."""
        if (record := self._live.get(request.arrival_index)) is not None:
            record.prefix = prefix

    def ended(self, request: Request, how: str, now_s: float) -> Sequence[Event]:
        """The request has ended. From now on its record may be forgotten. Returns the events kept."""
        if (record := self._live.pop(request.arrival_index, None)) is None:
            return ()
        record.add_event(("ended", how, self.decisions, now_s))
        self._ended[record.arrival_index] = record
        for name in _names(record):  # finished ones are kept in the order in which they finished
            self._names[name][record.arrival_index] = self._names[name].pop(record.arrival_index)
        if len(self._ended) > MAX_ENDED:
            _, oldest = self._ended.popitem(last=False)
            for name in _names(oldest):
                del self._names[name][oldest.arrival_index]
                if not self._names[name]:
                    del self._names[name]
        return record.events

    def decided(
        self,
        worker: int,
        rejected: Sequence[tuple[Request, str, str]],
        closed: tuple[str, str] | None,
        now_s: float,
        at_limit: Mapping[str, int] = MappingProxyType({}),
        without_grammar: Sequence[Request] = (),
    ) -> None:
        """A decision for a worker looked at these requests and rejected them, in this order; or it looked at none, and
        `closed` says why (reason, detail). `at_limit`: the skipped tenants, each with the number of its running
        tokens. `without_grammar`: the requests with a grammar that the worker still prepares."""
        self.decisions += 1
        if at_limit or worker in self._at_limit:
            self._note_at_limit(worker, at_limit, now_s)
        before, top = self._last.get(worker, (0, None))
        preparing = [(request, "grammar", "the worker prepares it") for request in without_grammar]
        for request, reason, detail in (*rejected, *preparing):
            if (record := self._live.get(request.root.arrival_index)) is not None:
                self._extend(record, worker, reason, detail, before, now_s)
        if rejected:
            (request, reason, _), detail = rejected[0], ""
            arrival_index, name = request.root.arrival_index, request.root.request_id
        elif closed:
            arrival_index, name, (reason, detail) = 0, "", closed
        else:
            self._last[worker] = self.decisions, None
            return
        if top is None or (top.arrival_index, top.span.reason) != (arrival_index, reason):
            span = Span(reason, detail, self.decisions, self.decisions, now_s, now_s, worker)
            top = TopRejected(arrival_index, name, span)
            self._tops.append(top)
        top.span.detail, top.span.last, top.span.to_s = detail, self.decisions, now_s
        self._last[worker] = self.decisions, top

    def _note_at_limit(self, worker: int, at_limit: Mapping[str, int], now_s: float) -> None:
        before, now = self._at_limit.pop(worker, {}), dict[str, AtLimit]()
        for tenant, tokens in at_limit.items():
            if (one := before.get(tenant)) is None:
                one = AtLimit(tenant, tokens, Span("tenant", "", self.decisions, 0, now_s, 0.0, worker))
                self._limits.append(one)
            one.tokens, one.span.last, one.span.to_s = tokens, self.decisions, now_s
            now[tenant] = one
        if now:
            self._at_limit[worker] = now

    def worker_gone(self, worker: int) -> None:
        self._last.pop(worker, None)
        self._at_limit.pop(worker, None)

    def out(self, reason: str, detail: str, now_s: float) -> None:
        """From now on no decision is possible, for this reason. An empty reason: decisions go on."""
        outage = self._outages[-1] if self._outages and self._outages[-1].to_s == math.inf else None
        if outage is not None and outage.reason != reason:
            outage.last, outage.to_s, outage = self.decisions, now_s, None
        if outage is None and reason:
            self._outages.append(Span(reason, detail, self.decisions, self.decisions, now_s, math.inf))

    @property
    def num_live(self) -> int:
        """Live sequences."""
        return len(self._live)

    def recent(self, num_live: int, num_ended: int) -> list[Record]:
        """Sequences to show, by arrival: at most `num_live` live ones (if there are more, half of these are the oldest
        and half the newest), and the last `num_ended` finished ones."""
        live, half = self._live.values(), num_live // 2
        if len(live) <= num_live:
            shown = list(live)
        else:
            shown = [*itertools.islice(live, half), *itertools.islice(reversed(live), num_live - half)]
        shown += itertools.islice(reversed(self._ended.values()), num_ended)
        return sorted(shown, key=lambda record: record.arrival_index)

    def find(self, name: str, tenant: str | None = None, key: str | None = None) -> list[Record]:
        """The sequences of one tenant and API key that an id stands for, by arrival. Empty if the id is unknown.
        `tenant`, `key`: only requests of these; None: of any.

        An answer id stands for all sequences of the answer. A request id stands for its own sequence, and for sequences
        of the same answer with ids that continue it (`x-1`: another prompt of request x; `x.1`: another sample). If
        several sequences have the same request id, it stands for the last live one, otherwise the last finished one.

        Clients choose ids. Raises SeveralOwners rather than show the request of another tenant or key.
        """
        chosen = [
            record for record in self._with_name(name) if tenant in (None, record.tenant) and key in (None, record.key)
        ]
        if len(owners := {(record.tenant, record.key) for record in chosen}) > 1:
            raise SeveralOwners(sorted(owners))
        known = self._last_of(chosen)
        if of_answer := [record for record in known.values() if record.answer_id == name]:
            return of_answer
        if (record := known.get(name)) is None:
            return []
        continued = (f"{name}.", f"{name}-")
        owner = record.tenant, record.key
        others = self._last_of(one for one in self._with_name(record.answer_id) if (one.tenant, one.key) == owner)
        return [record, *(other for other in others.values() if other.request_id.startswith(continued))]

    def _with_name(self, name: str) -> Iterator[Record]:
        """Records with this request id or answer id."""
        for index in self._names.get(name, ()):
            yield self._live.get(index) or self._ended[index]

    def _last_of(self, records: Iterable[Record]) -> dict[str, Record]:
        """The last live record of each request id, otherwise the last finished one; by arrival."""
        found: dict[str, Record] = {}
        for record in records:
            before = found.get(record.request_id)
            if before is None or record.arrival_index in self._live or before.arrival_index not in self._live:
                found[record.request_id] = record
        return dict(sorted(found.items(), key=lambda item: item[1].arrival_index))

    def explain(self, name: str, now_s: float) -> list[Span] | None:
        """Why the first sequence with this id waited. None if the id is unknown."""
        found = self.find(name)
        return self.explain_record(found[0], now_s) if found else None

    def explain_record(self, record: Record, now_s: float) -> list[Span]:
        """Oldest first. Times are seconds since the arrival."""
        spans = [Span(reason, detail, n, n, at_s, at_s) for reason, detail, n, at_s in record.events] + record.looks
        for wait in record.waits():
            spans += self._turns(record, wait)
            wait.to_s = min(wait.to_s, now_s)
            for out in self._outages:
                if out.from_s < wait.to_s and wait.from_s < out.to_s:
                    from_s, to_s = max(out.from_s, wait.from_s), min(out.to_s, wait.to_s)
                    spans.append(Span(out.reason, out.detail, max(out.first, wait.first), out.last, from_s, to_s))
        joined = _joined(sorted(spans, key=lambda span: (span.from_s, span.first)))
        return [replace(s, from_s=s.from_s - record.arrival_s, to_s=s.to_s - record.arrival_s) for s in joined]

    def _turns(self, record: Record, wait: Wait) -> list[Span]:
        """Why the request waited while no decision looked at it: its tenant was at its limit; another request was
        before it, and waited for a reason; or the decision looked at no request."""
        told, looks = list[Span](), Apart(record.looks)
        for limit in self._limits:
            if limit.tenant == record.tenant:
                detail = f"{limit.tokens} tokens of tenant {limit.tenant!r} run, its limit is {self.tenant_limit}"
                told += looks.parts(replace(limit.span, detail=detail), wait)
        apart = Apart([*record.looks, *told])
        for one in self._tops:
            top = one.span
            if one.arrival_index == record.arrival_index or top.last <= wait.first or top.first > wait.last:
                continue
            if one.request_id:
                detail = f"behind {one.request_id}, which waits for {top.reason}"
                top = replace(top, reason="order", detail=detail, behind=one.request_id)
            told += apart.parts(top, wait)
        return told

    def _extend(self, record: Record, worker: int, reason: str, detail: str, before: int, now_s: float) -> None:
        """Extend the last range if it includes `before`, the worker's previous decision, has the same reason, and no
        event came since. Otherwise begin a new range."""
        last = next((span for span in reversed(record.looks) if span.worker == worker), None)
        since = max(before, record.events[-1][2])
        if last is not None and last.reason == reason and last.last >= since:
            last.last, last.to_s, last.detail = self.decisions, now_s, detail
        else:
            record.looks.append(Span(reason, detail, self.decisions, self.decisions, now_s, now_s, worker))
            del record.looks[:-MAX_SPANS]


def _names(record: Record) -> set[str]:
    """The ids that find the record."""
    return {name for name in (record.request_id, record.answer_id) if name}


class Apart:
    """Ranges with a known reason, to be cut out of other ranges. Those of one worker do not overlap."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._of: dict[int, list[Span]] = {}  # by worker, in order
        for span in sorted(spans, key=lambda span: span.first):
            self._of.setdefault(span.worker, []).append(span)

    def parts(self, span: Span, wait: Wait) -> list[Span]:
        """The parts of the span within the wait that no known range covers."""
        told, parts = self._of.get(span.worker, []), list[Span]()
        first, last, from_s = max(span.first, wait.first + 1), min(span.last, wait.last), max(span.from_s, wait.from_s)
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
    """Merge adjacent ranges with the same reason and detail, also of several workers."""
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
