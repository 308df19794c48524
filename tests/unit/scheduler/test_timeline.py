"""The request timeline: why a request waited, from the decisions of the scheduler."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.output import timeline
from scheduler_svc.core.output.timeline import RequestTimeline
from scheduler_svc.core.requests.request import Request


def request(number: int) -> Request:
    sampling = SamplingParams(max_tokens=1)
    return Request(number, "s", number, f"r{number}", b"1234", bytearray(), sampling, float(number))


def told(notes: RequestTimeline, request_id: str) -> list[tuple[str, str, int, int, float, float]]:
    spans = notes.explain(request_id, 1e9)
    assert spans is not None
    return [(s.reason, s.detail, s.first, s.last, s.from_s, s.to_s) for s in spans]


def test_a_reason_is_one_range_of_decisions() -> None:
    notes, first, second = RequestTimeline(), request(1), request(2)
    notes.arrived(first, 1.0)
    for i in range(3):
        notes.decided(1, [(first, "slots", "all 2 are taken")], None, 2.0 + i)
    notes.decided(1, [(first, "capacity", "needs 9 blocks, 3 are available")], None, 5.0)
    notes.decided(1, [(second, "capacity", "")], None, 6.0)
    notes.event(first, "running", "on worker 1", 6.0)
    notes.ended(first, "length", 7.0)
    assert told(notes, "r1") == [
        ("waiting", "1 tokens", 0, 0, 0.0, 0.0),
        ("slots", "all 2 are taken", 1, 3, 1.0, 3.0),
        ("capacity", "needs 9 blocks, 3 are available", 4, 4, 4.0, 4.0),
        ("running", "on worker 1", 5, 5, 5.0, 5.0),
        ("ended", "length", 5, 5, 6.0, 6.0),
    ]


def test_consecutive_decisions_of_two_workers_are_one_range_without_a_worker() -> None:
    notes, first = RequestTimeline(), request(1)
    notes.arrived(first, 1.0)
    notes.decided(1, [(first, "slots", "")], None, 2.0)
    notes.decided(2, [(first, "slots", "")], None, 3.0)
    assert told(notes, "r1") == [("waiting", "1 tokens", 0, 0, 0.0, 0.0), ("slots", "", 1, 2, 1.0, 2.0)]
    assert [span.worker for span in notes.explain("r1", 1e9) or []] == [0, 0]


def test_a_request_that_was_not_considered_waits_behind_the_first_that_was() -> None:
    """The span ends with the decision that admits the request, although the first request still waits."""
    notes, first, second = RequestTimeline(), request(1), request(2)
    notes.arrived(first, 1.0)
    notes.arrived(second, 2.0)
    for i in range(4):
        notes.decided(1, [(first, "blocks", "")], None, 3.0 + i)
    notes.event(second, "running", "", 6.0)
    for i in range(4):
        notes.decided(1, [(first, "blocks", "")], None, 7.0 + i)
    assert told(notes, "r2") == [
        ("waiting", "1 tokens", 0, 0, 0.0, 0.0),
        ("order", "behind r1, which waits for blocks", 1, 3, 1.0, 4.0),
        ("running", "", 4, 4, 4.0, 4.0),
    ]


def test_the_decision_that_admits_a_request_says_nothing_of_others() -> None:
    notes, first, second = RequestTimeline(), request(1), request(2)
    for one in (first, second):
        notes.arrived(one, 2.0)
    notes.decided(1, [(first, "slots", ""), (second, "slots", "")], None, 3.0)
    notes.decided(1, [(second, "slots", "")], None, 4.0)
    notes.event(first, "running", "", 4.0)
    assert [span[0] for span in told(notes, "r1")] == ["waiting", "slots", "running"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeline forgets the oldest ended requests first. It forgets no live request, however old."""
    monkeypatch.setattr(timeline, "MAX_ENDED", 10)
    notes, requests = RequestTimeline(), [request(i) for i in range(50)]
    waits = request(100)
    notes.arrived(waits, 1.0)
    for one in requests:
        notes.arrived(one, 50.0)
        notes.ended(one, "length", 50.0)
    assert notes.explain("r100", 1e9) is not None
    assert notes.explain("r39", 1e9) is None
    assert notes.explain("r40", 1e9) is not None
    for i in range(1000):  # the reason changes again and again
        notes.decided(1, [(waits, "slots" if i % 20 < 10 else "blocks", "")], None, 51.0)
    assert len(told(notes, "r100")) < 3 * timeline.MAX_SPANS + timeline.MAX_TOP_REJECTED
    assert notes.explain("never seen", 1e9) is None


def test_explain_shows_the_later_of_two_live_requests_with_one_id() -> None:
    notes, first, second = RequestTimeline(), request(1), request(2)
    second.request_id = first.request_id
    notes.arrived(first, 1.0)
    notes.arrived(second, 2.0)
    notes.event(second, "running", "on worker 1", 4.0)
    assert [span[0] for span in told(notes, "r1")] == ["waiting", "running"]
    notes.ended(second, "stop", 5.0)
    assert [span[0] for span in told(notes, "r1")] == ["waiting"], "the first request still waits"
    notes.ended(first, "length", 6.0)
    assert told(notes, "r1")[-1][:2] == ("ended", "length")


def sequence(number: int, request_id: str, answer_id: str) -> Request:
    made = request(number)
    made.request_id, made.metadata.answer_id = request_id, answer_id
    return made


def found(notes: RequestTimeline, name: str) -> list[tuple[str, int]]:
    return [(record.request_id, record.arrival_index) for record in notes.find(name)]


def test_an_answer_id_and_a_request_id_stand_for_all_sequences_of_the_request() -> None:
    """Two prompts with two samples each, and another request with an id that only looks alike."""
    notes = RequestTimeline()
    ids = ["x", "x.1", "x-1", "x-1.1"]
    sequences = [sequence(i + 1, name, "cmpl-a") for i, name in enumerate(ids)]
    for one in [*sequences, sequence(5, "x-2", "cmpl-b")]:
        notes.arrived(one, 1.0)
    everything = list(zip(ids, (1, 2, 3, 4), strict=True))
    assert found(notes, "cmpl-a") == everything
    assert found(notes, "x") == everything
    assert found(notes, "x-1") == everything[2:]
    assert found(notes, "x.1") == everything[1:2]
    assert found(notes, "cmpl-") == []
    for one in sequences:
        notes.ended(one, "length", 2.0)
    assert found(notes, "cmpl-a") == everything, "also when they have finished"


def test_an_id_of_several_tenants_or_keys_needs_the_tenant_or_the_key() -> None:
    notes = RequestTimeline()
    for number, (tenant, key) in enumerate([("a", "k1"), ("b", "k2"), ("b", "k3"), ("b", "k2")], 1):
        one = sequence(number, "x", "cmpl-x")
        one.metadata.tenant, one.metadata.owner = tenant, key
        notes.arrived(one, 1.0)
    for name in ("x", "cmpl-x"):
        with pytest.raises(timeline.SeveralOwners) as several:
            notes.find(name)
        assert several.value.owners == [("a", "k1"), ("b", "k2"), ("b", "k3")]
        assert [record.arrival_index for record in notes.find(name, tenant="a")] == [1]
        assert [record.arrival_index for record in notes.find(name, key="k3")] == [3]
        with pytest.raises(timeline.SeveralOwners):
            notes.find(name, tenant="b")
        assert notes.find(name, tenant="a", key="k2") == []
    assert [record.arrival_index for record in notes.find("x", key="k2")] == [4], "the last one of this key"


def test_an_answer_of_several_attempts_stands_for_the_last_ones() -> None:
    """The scheduler was lost and the gateway submitted again; later the client came back by another gateway."""
    notes = RequestTimeline()
    first, again, other = (sequence(i, name, "cmpl-a") for i, name in ((1, "x"), (2, "x"), (3, "y")))
    notes.arrived(first, 1.0)
    notes.arrived(again, 2.0)
    notes.ended(first, "abort", 3.0)
    assert found(notes, "cmpl-a") == found(notes, "x") == [("x", 2)]
    notes.ended(again, "abort", 4.0)
    notes.arrived(other, 5.0)
    assert found(notes, "cmpl-a") == [("x", 2), ("y", 3)]
    assert found(notes, "y") == [("y", 3)]


def test_a_forgotten_record_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_ENDED", 1)
    notes = RequestTimeline()
    for i in range(4):
        one = sequence(i, f"x.{i}", "cmpl-a")
        notes.arrived(one, 1.0)
        notes.ended(one, "length", 2.0)
    assert found(notes, "cmpl-a") == [("x.3", 3)]
    assert found(notes, "x.0") == []
    assert set(notes._names) == {"x.3", "cmpl-a"}


def test_decisions_of_several_workers_make_one_range_per_reason() -> None:
    """Two workers decide in turns, each with its own reason. The second one looks at no request."""
    notes, first, second = RequestTimeline(), request(1), request(2)
    notes.arrived(first, 0.0)
    notes.arrived(second, 0.0)
    for i in range(5):
        notes.decided(1, [(first, "slots", "all 2 are taken")], None, 1.0 + 2 * i)
        notes.decided(2, [], ("full", "no sequence has left"), 2.0 + 2 * i)
    assert [span[:4] for span in told(notes, "r1")] == [
        ("waiting", "1 tokens", 0, 0),
        ("slots", "all 2 are taken", 1, 9),
        ("full", "no sequence has left", 2, 10),
    ]
    assert [span[:4] for span in told(notes, "r2")] == [
        ("waiting", "1 tokens", 0, 0),
        ("order", "behind r1, which waits for slots", 1, 9),
        ("full", "no sequence has left", 2, 10),
    ]
    notes.decided(1, [], None, 11.0)  # worker 1 rejects no request in this decision, so its range ends
    notes.decided(1, [(first, "slots", "all 2 are taken")], None, 12.0)
    assert [span[0] for span in told(notes, "r1")] == ["waiting", "slots", "full", "slots"]


def test_a_wait_is_explained_even_if_its_beginning_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request has so many reasons that its arrival is dropped. Then it waits behind another request."""
    monkeypatch.setattr(timeline, "MAX_SPANS", 2)
    notes, first, second = RequestTimeline(), request(1), request(2)
    notes.arrived(first, 1.0)
    notes.arrived(second, 2.0)
    for reason in ("slots", "blocks", "slots"):
        notes.decided(1, [(second, reason, "")], None, 3.0)
    notes.decided(1, [(first, "blocks", "")], None, 4.0)
    notes.decided(1, [(first, "blocks", "")], None, 5.0)
    notes.event(second, "running", "on worker 1", 5.0)
    reasons = [(reason, detail, first, last) for reason, detail, first, last, *_ in told(notes, "r2")]
    assert ("order", "behind r1, which waits for blocks", 4, 4) in reasons


def test_each_worker_has_its_own_ranges() -> None:
    """Two workers reject the request in turns. The timeline has a row per worker and reason, not one per decision."""
    notes, head = RequestTimeline(), request(1)
    notes.arrived(head, 0.0)
    for i in range(200):
        notes.decided(1, [(head, "slots", "all 2 are taken")], None, float(i))
        notes.decided(2, [(head, "capacity", f"needs 9 blocks, {i % 3} are available")], None, float(i))
    notes.event(head, "running", "on worker 1", 200.0)
    notes.event(head, "preempted", "", 201.0)
    notes.decided(1, [(head, "slots", "all 2 are taken")], None, 202.0)
    assert [span[:4] for span in told(notes, "r1")] == [
        ("waiting", "1 tokens", 0, 0),
        ("slots", "all 2 are taken", 1, 399),
        ("capacity", "needs 9 blocks, 1 are available", 2, 400),
        ("running", "on worker 1", 400, 400),
        ("preempted", "", 400, 400),
        ("slots", "all 2 are taken", 401, 401),
    ]


def test_rejections_do_not_displace_events() -> None:
    """As for a beam search: decisions look at its beams while it runs."""
    notes, search, other = RequestTimeline(), request(1), request(2)
    notes.arrived(search, 1.0)
    notes.event(search, "running", "its beams", 2.0)
    for i in range(3 * timeline.MAX_SPANS):
        notes.decided(1, [(search, "slots" if i % 2 else "blocks", "")], None, 3.0)
    notes.arrived(other, 4.0)
    notes.decided(1, [(other, "slots", "")], None, 4.0)
    notes.ended(search, "length", 5.0)
    reasons = [span[0] for span in told(notes, "r1")]
    assert reasons[:2] == ["waiting", "running"]
    assert reasons[-1] == "ended"
    assert set(reasons[2:-1]) == {"slots", "blocks"}, "the search never waited behind another request"
    assert len(reasons) == timeline.MAX_SPANS + 3


def test_two_requests_of_the_same_id_are_kept_apart() -> None:
    notes, first, second = RequestTimeline(), request(1), request(2)
    second.request_id = first.request_id
    notes.arrived(first, 1.0)
    notes.arrived(second, 2.0)
    notes.decided(1, [(first, "slots", "")], None, 3.0)
    assert ("order", "behind r1, which waits for slots", 1, 1) in [span[:4] for span in told(notes, "r1")]


def test_an_outage_is_the_reason_while_no_decision_is_possible() -> None:
    notes, first = RequestTimeline(), request(1)
    notes.out("no-cache", "the cache does not answer", 0.0)
    notes.arrived(first, 1.0)
    notes.out("no-worker", "no worker takes requests", 2.5)
    notes.out("no-worker", "no worker takes requests", 3.0)
    notes.out("", "", 5.0)
    notes.decided(1, [(first, "slots", "")], None, 6.0)
    notes.event(first, "running", "", 7.0)
    notes.out("no-worker", "no worker takes requests", 8.0)
    notes.event(first, "requeued", "its worker was lost", 8.0)
    spans = notes.explain("r1", 9.5)
    assert spans is not None
    assert [(s.reason, s.from_s, s.to_s) for s in spans] == [
        ("waiting", 0.0, 0.0),
        ("no-cache", 0.0, 1.5),
        ("no-worker", 1.5, 4.0),
        ("slots", 5.0, 5.0),
        ("running", 6.0, 6.0),
        ("requeued", 7.0, 7.0),
        ("no-worker", 7.0, 8.5),
    ]


def test_a_later_wait_is_explained_from_its_own_beginning() -> None:
    notes, first, second = RequestTimeline(), request(1), request(2)
    notes.arrived(first, 1.0)
    notes.arrived(second, 2.0)
    notes.event(second, "running", "", 3.0)
    for i in range(5):
        notes.decided(1, [(first, "blocks", "")], None, 4.0 + i)
    notes.event(second, "preempted", "", 9.0)
    for i in range(3):
        notes.decided(1, [(first, "blocks", "")], None, 10.0 + i)
    assert told(notes, "r2")[-1] == ("order", "behind r1, which waits for blocks", 6, 8, 7.0, 10.0)


def test_a_request_waits_behind_another_only_where_it_was_not_looked_at() -> None:
    notes, first, second = RequestTimeline(), request(1), request(2)
    notes.arrived(first, 0.0)
    notes.arrived(second, 2.0)
    for i in range(9):
        looked_at = [(second, "blocks", "")] if i in (3, 4, 8) else []
        notes.decided(1, [(first, "blocks", ""), *looked_at], None, 3.0 + i)
    assert [span[:1] + span[2:] for span in told(notes, "r2")[1:]] == [
        ("order", 1, 3, 1.0, 4.0),
        ("blocks", 4, 5, 4.0, 5.0),
        ("order", 6, 8, 5.0, 9.0),
        ("blocks", 9, 9, 9.0, 9.0),
    ]


def test_only_the_tenants_limit_is_named_while_a_request_waits_for_it() -> None:
    """The decisions form ranges. A decision that stopped earlier in the queue does not name the limit."""
    notes, one, first = RequestTimeline(30), request(1), request(2)
    one.metadata.tenant = "a"
    notes.arrived(one, 1.0)
    notes.arrived(first, 1.0)
    for i in range(4):
        notes.decided(1, [], None, 2.0 + i, {"a": 28, "b": 30})
    notes.decided(1, [(first, "blocks", "")], None, 6.0, {"b": 30})
    notes.decided(1, [(first, "blocks", "")], None, 7.0, {"a": 22})
    assert [span[:4] for span in told(notes, "r1")[1:]] == [
        ("tenant", "28 tokens of tenant 'a' run, its limit is 30", 1, 4),
        ("order", "behind r2, which waits for blocks", 5, 5),
        ("tenant", "22 tokens of tenant 'a' run, its limit is 30", 6, 6),
    ]
