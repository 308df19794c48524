"""The rule that blames a failed step on one of its rows, or on none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.faults.suspects import FEW, Suspects


def anything(group: list[int]) -> bool:
    return True


def test_few_suspects_are_retried_one_by_one_and_many_in_small_groups() -> None:
    few, many = Suspects(2), Suspects(2)
    few.blame(range(FEW), FEW)
    assert few.waiting() == [[one] for one in range(FEW)]
    many.blame(range(256), 256)
    assert many.waiting() == [list(range(first, first + 16)) for first in range(0, 256, 16)]


def test_a_group_that_fails_is_retried_one_by_one_after_all_others() -> None:
    suspects = Suspects(2)
    suspects.blame(range(9), 9)
    assert suspects.take(anything) == [0, 1, 2]
    assert suspects.blame([0, 1, 2], 3) is None
    assert suspects.waiting() == [[3, 4, 5], [6, 7, 8], [0], [1], [2]]


def test_a_suspect_that_fails_alone_twice_in_a_row_is_poisoned() -> None:
    suspects = Suspects(2)
    assert suspects.blame([7], 1) is None
    assert suspects.take(anything) == [7]
    assert suspects.blame([7], 1) == 7
    assert 7 not in suspects
    assert suspects.waiting() == []


def test_a_row_cleared_in_between_begins_anew() -> None:
    suspects = Suspects(2)
    suspects.blame([7], 1)
    suspects.clear(7)
    assert suspects.blame([7], 1) is None


def test_a_row_that_is_alone_only_because_others_left_was_not_alone() -> None:
    suspects = Suspects(2)
    assert suspects.blame([7], 2) is None
    assert suspects.blame([7], 2) is None
    assert suspects.blame([7], 1) is None
    assert suspects.blame([7], 1) == 7


def test_only_a_suitable_group_is_taken_and_a_requeued_group_waits_again() -> None:
    suspects = Suspects(2)
    suspects.blame([1, 2], 2)
    assert suspects.take(lambda group: group == [2]) == [2]
    assert suspects.take(lambda group: group == [2]) == []
    suspects.requeue([2])
    assert suspects.waiting() == [[1], [2]]
    suspects.clear(1)
    assert suspects.waiting() == [[2]]


@settings(deadline=None)
@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_poisoned_row_is_found_and_no_other(num: int, poison: set[int], after: int, rng) -> None:  # type: ignore[no-untyped-def]
    """Also when other rows join the running rows in between, and some of these are poisoned, too."""
    poison = {one for one in poison if one < num}
    suspects, running, poisoned = Suspects(after), set[int](), set[int]()
    arriving = list(range(num))
    failures = 0

    def run(rows: set[int]) -> None:
        nonlocal failures
        if not rows & poison:
            running.update(rows)
            for one in rows:
                suspects.clear(one)
            return
        failures += 1
        running.difference_update(rows)
        found = suspects.blame(sorted(rows), len(rows))
        if found is not None:
            assert len(rows) == 1
            poisoned.add(found)
        assert all((one in suspects) == (one != found) for one in rows)

    while arriving or suspects.waiting():
        if suspects.waiting() and rng.random() < 0.7:
            group = suspects.take(anything)
            if rng.random() < 0.2:
                suspects.requeue(group)
            else:
                run(set(group))
        elif arriving:
            count = rng.randrange(1, len(arriving) + 1)
            fresh, arriving = arriving[:count], arriving[count:]
            run(running | set(fresh))
    assert poisoned == poison
    assert running == set(range(num)) - poison
    # Each poisoned row fails once with all rows, once in its retry group, and `after` times alone.
    assert failures <= len(poison) * (2 + after)


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=40))
def test_a_failure_with_other_rows_never_makes_a_row_poisoned(failures: list[tuple[int, bool]]) -> None:
    """Only a row that was alone in its last two failures is poisoned, however often it failed together with others."""
    suspects = Suspects(2)
    alone = dict.fromkeys(range(8), 0)
    for one, in_company in failures:
        rows = [one, (one + 1) % 8] if in_company else [one]
        found = suspects.blame(rows, len(rows))
        for row in rows:
            alone[row] = 0 if in_company else alone[row] + 1
        assert found == (one if alone[one] == 2 else None)
        if found is not None:
            alone[one] = 0
