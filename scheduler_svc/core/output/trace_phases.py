"""The phases of a traced request's life, one after the other, from its timeline and its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from scheduler_svc.core.output.timeline import BEAMS, Event
from scheduler_svc.core.rejection import Rejection
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.requests.trace import TracedChunk

PhaseName = Literal["queued", "prefill", "decode", "preempted", "recovered"]
_WAITS: dict[str, PhaseName] = {"waiting": "queued", "preempted": "preempted", "requeued": "recovered"}


@dataclass(frozen=True, slots=True)
class TracedPhase:
    """One phase. Times are on the scheduler's clock. `detail`: a sentence of the timeline. `chunk`: of a prefill."""

    name: PhaseName
    from_s: float
    to_s: float
    detail: str = ""
    chunk: TracedChunk | None = None


class EndedRequests(Protocol):
    """Takes traced requests that have ended."""

    def ended(self, request: Request, events: Sequence[Event], how: str, error: Rejection | None, now_s: float) -> None:
        """`events`: of its timeline. `how`: stop, length, abort or error. `error`: why, if it is an error."""


def phases(events: Sequence[Event], chunks: Sequence[TracedChunk], *, resubmitted: bool) -> Iterator[TracedPhase]:
    """From the arrival to the end, without overlap. `resubmitted`: another scheduler had the request before, so its
    first wait is a recovery.

    A request waits from an event that says so until the next event, and runs from `running` on: first its chunks, then
    it decodes. A worker computes one step after the other, so a chunk begins when the chunk before it has ended, also
    if both were in flight.
    """
    for index, ((reason, detail, _, from_s), (_, _, _, to_s)) in enumerate(pairwise(events)):
        if (name := _WAITS.get(reason)) is not None:
            yield TracedPhase("recovered" if resubmitted and not index else name, from_s, to_s, detail)
        elif reason == "running":
            yield from _run(detail, from_s, to_s, [chunk for chunk in chunks if from_s <= chunk.sent_s < to_s])


def _run(detail: str, from_s: float, to_s: float, chunks: Sequence[TracedChunk]) -> Iterator[TracedPhase]:
    """What happened between an admission and the event after it."""
    if not chunks:  # the cache refused the blocks after all; or it is a beam search: its beams are not traced
        yield TracedPhase("decode" if detail == BEAMS else "queued", from_s, to_s, detail)
        return
    at_s = from_s
    for chunk in chunks:
        at_s, began_s = to_s if chunk.ended_s is None else min(chunk.ended_s, to_s), max(at_s, chunk.sent_s)
        yield TracedPhase("prefill", min(began_s, at_s), at_s, detail, chunk)
        detail = ""
    if chunks[-1].samples and at_s < to_s:
        yield TracedPhase("decode", at_s, to_s)
