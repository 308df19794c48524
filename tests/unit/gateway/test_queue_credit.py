"""How many requests a gateway admits by the queue credit of the scheduler."""

from __future__ import annotations

from services.gateway.admission.queue_credit import QueueCredit


def test_a_scheduler_that_tells_nothing_is_asked() -> None:
    credit = QueueCredit()
    credit.sent(1000)
    credit.tick()
    assert credit.takes(1000)


def test_what_is_on_its_way_takes_of_the_places() -> None:
    credit = QueueCredit()
    credit.update(num_free=4, num_submissions=0)
    credit.sent(2)
    assert credit.takes(1)
    assert not credit.takes(2)
    credit.update(num_free=3, num_submissions=1)  # of which it had seen one
    assert credit.takes(1)
    assert not credit.takes(2)
    credit.update(num_free=0, num_submissions=2)
    assert not credit.takes(0)


def test_an_old_number_refuses_only_more_than_ever_fit() -> None:
    """Requests of other gateways may have left the queue since the scheduler sent the number."""
    credit = QueueCredit()
    credit.update(num_free=8, num_submissions=0)
    credit.update(num_free=1, num_submissions=0)
    credit.sent(3)
    credit.tick()
    assert not credit.takes(0), "the number is only one tick old"
    credit.tick()
    assert credit.takes(7)
    assert not credit.takes(8)


def test_a_number_that_has_not_changed_is_not_told_again_and_is_not_old() -> None:
    credit = QueueCredit()
    credit.unchanged()
    assert credit.takes(10**6), "the scheduler has sent no number yet"
    credit.update(num_free=8, num_submissions=0)
    credit.update(num_free=1, num_submissions=0)
    for _ in range(4):
        credit.unchanged()
        credit.tick()
    assert credit.takes(0)
    assert not credit.takes(1)
    credit.tick()
    assert credit.takes(7)
    credit.unchanged()
    assert not credit.takes(1)
