"""How many requests a gateway admits."""

from __future__ import annotations

from services.gateway.admission.control import AdmissionControl


def test_without_a_report_of_the_scheduler_every_request_is_admitted() -> None:
    control = AdmissionControl()
    control.sent(1000)
    control.tick(0.0)
    assert control.takes(1000)


def test_requests_on_their_way_to_the_scheduler_take_queue_positions() -> None:
    control = AdmissionControl()
    control.update(num_free=4, num_submissions=0)
    control.sent(2)
    assert control.takes(1)
    assert not control.takes(2)
    control.update(num_free=3, num_submissions=1)  # the scheduler has seen one of the two
    assert control.takes(1)
    assert not control.takes(2)
    control.update(num_free=0, num_submissions=2)
    assert not control.takes(0)


def test_after_an_old_report_only_the_largest_reported_number_is_a_limit() -> None:
    """Requests of other gateways may have left the queue since the report."""
    control = AdmissionControl()
    control.update(num_free=8, num_submissions=0)
    control.update(num_free=1, num_submissions=0)
    control.sent(3)
    control.tick(0.0)
    assert not control.takes(0), "the report is only one tick old"
    control.tick(0.0)
    assert control.takes(7)
    assert not control.takes(8)


def test_a_number_of_free_positions_that_has_not_changed_stays_valid() -> None:
    control = AdmissionControl()
    control.unchanged()
    assert control.takes(10**6), "the scheduler has sent no number yet"
    control.update(num_free=8, num_submissions=0)
    control.update(num_free=1, num_submissions=0)
    for _ in range(4):
        control.unchanged()
        control.tick(0.0)
    assert control.takes(0)
    assert not control.takes(1)
    control.tick(0.0)
    assert control.takes(7)
    control.unchanged()
    assert not control.takes(1)


def test_requests_that_have_entered_and_are_not_sent_take_positions() -> None:
    control = AdmissionControl()
    control.update(num_free=3, num_submissions=0)
    first = control.enter(10.0, num_unsent=1)
    assert first is not None
    assert control.enter(10.5, num_unsent=1) is not None
    assert control.enter(10.5, num_unsent=1) is None
    control.leave(first)
    assert control.enter(10.6, num_unsent=1) is not None
    assert control.enter(11.4, num_unsent=1) is None
    assert control.enter(11.55, num_unsent=1) is not None, "one has taken longer than a second"


def test_a_new_stream_has_reported_nothing() -> None:
    control = AdmissionControl()
    control.update(num_free=0, num_submissions=0)
    control.new_stream()
    assert control.takes(1000)
