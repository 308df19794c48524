"""How many a gateway lets in."""

from __future__ import annotations

from services.gateway.admission.room import Room


def test_a_scheduler_that_tells_nothing_is_asked() -> None:
    room = Room()
    room.sent(1000)
    room.tick()
    assert room.takes(1000)


def test_what_is_on_its_way_takes_of_the_places() -> None:
    room = Room()
    room.told(places=4, num_submissions=0)
    room.sent(2)
    assert room.takes(1)
    assert not room.takes(2)
    room.told(places=3, num_submissions=1)  # of which it had seen one
    assert room.takes(1)
    assert not room.takes(2)
    room.told(places=0, num_submissions=2)
    assert not room.takes(0)


def test_a_number_that_is_old_refuses_nobody_but_more_than_ever_fit() -> None:
    """Others may have left meanwhile, and nobody has told so."""
    room = Room()
    room.told(places=8, num_submissions=0)
    room.told(places=1, num_submissions=0)
    room.sent(3)
    room.tick()
    assert not room.takes(0), "it has only just been told"
    room.tick()
    assert room.takes(7)
    assert not room.takes(8)


def test_a_number_that_has_not_changed_is_not_told_again_and_is_not_old() -> None:
    room = Room()
    room.unchanged()
    assert room.takes(10**6), "nothing was told"
    room.told(places=8, num_submissions=0)
    room.told(places=1, num_submissions=0)
    for _ in range(4):
        room.unchanged()
        room.tick()
    assert room.takes(0)
    assert not room.takes(1)
    room.tick()
    assert room.takes(7)
    room.unchanged()
    assert not room.takes(1)
