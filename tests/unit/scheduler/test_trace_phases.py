"""The phases that the spans of a traced request show."""

from __future__ import annotations

from scheduler_svc.core.output.timeline import BEAMS, Event
from scheduler_svc.core.output.trace_phases import TracedPhase, phases
from scheduler_svc.core.requests.trace import MAX_CHUNKS, RequestTrace


def trace_of(*chunks: tuple[int, int, bool, float, float | None]) -> RequestTrace:
    trace = RequestTrace("t", "p")
    for worker, step, samples, sent_s, ended_s in chunks:
        trace.sent(worker, step, 100 * step, samples=samples, now_s=sent_s)
        if ended_s is not None:
            trace.ended(worker, step, ended_s)
    return trace


def shown(events: list[Event], trace: RequestTrace, *, resubmitted: bool = False) -> list[tuple[str, float, float]]:
    found = list(phases(events, trace.chunks, resubmitted=resubmitted))
    for phase in found:
        assert phase.from_s <= phase.to_s
    return [(phase.name, phase.from_s, phase.to_s) for phase in found]


def test_a_request_waits_prefills_in_chunks_that_do_not_overlap_and_decodes() -> None:
    events: list[Event] = [
        ("waiting", "9 tokens", 0, 0.0),
        ("running", "on worker 1", 1, 1.0),
        ("ended", "stop", 5, 9.0),
    ]
    trace = trace_of((1, 1, False, 1.1, 2.0), (1, 2, False, 1.2, 3.0), (1, 3, True, 2.1, 4.0))
    assert shown(events, trace) == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.1, 2.0),
        ("prefill", 2.0, 3.0),
        ("prefill", 3.0, 4.0),
        ("decode", 4.0, 9.0),
    ]
    chunks = [phase.chunk for phase in phases(events, trace.chunks, resubmitted=False) if phase.chunk is not None]
    assert [chunk.num_tokens for chunk in chunks] == [100, 200, 300]


def test_a_preempted_request_prefills_again_and_a_lost_worker_is_a_recovery() -> None:
    events: list[Event] = [
        ("waiting", "", 0, 0.0),
        ("running", "on worker 1", 1, 1.0),
        ("preempted", "for other requests", 2, 3.0),
        ("running", "on worker 1", 3, 4.0),
        ("requeued", "worker 1 is gone", 4, 6.0),
        ("running", "on worker 2", 5, 7.0),
        ("ended", "length", 6, 9.0),
    ]
    # The result of the chunk in flight at the loss never comes.
    trace = trace_of((1, 1, True, 1.0, 2.0), (1, 2, True, 4.0, None), (2, 1, True, 7.0, 8.0))
    assert shown(events, trace) == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
        ("decode", 2.0, 3.0),
        ("preempted", 3.0, 4.0),
        ("prefill", 4.0, 6.0),
        ("recovered", 6.0, 7.0),
        ("prefill", 7.0, 8.0),
        ("decode", 8.0, 9.0),
    ]


def test_the_first_wait_at_a_second_scheduler_is_a_recovery() -> None:
    events: list[Event] = [("waiting", "", 0, 0.0), ("running", "", 1, 1.0), ("ended", "stop", 2, 2.0)]
    assert shown(events, trace_of((1, 1, True, 1.0, 2.0)), resubmitted=True) == [
        ("recovered", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
    ]


def test_an_admission_that_the_cache_refused_counts_as_queued() -> None:
    events: list[Event] = [
        ("running", "on worker 1", 1, 0.0),
        ("running", "on worker 2", 2, 1.0),
        ("ended", "", 3, 2.0),
    ]
    assert shown(events, trace_of((2, 1, False, 1.0, 2.0))) == [("queued", 0.0, 1.0), ("prefill", 1.0, 2.0)]


def test_a_beam_search_decodes_from_its_start() -> None:
    events: list[Event] = [("running", BEAMS, 1, 0.0), ("ended", "stop", 3, 2.0)]
    assert list(phases(events, [], resubmitted=False)) == [TracedPhase("decode", 0.0, 2.0, BEAMS)]


def test_a_trace_keeps_a_bounded_number_of_chunks_and_counts_all() -> None:
    trace = trace_of(*((1, step, False, float(step), step + 0.5) for step in range(MAX_CHUNKS + 5)))
    assert (len(trace.chunks), trace.num_chunks) == (MAX_CHUNKS, MAX_CHUNKS + 5)
