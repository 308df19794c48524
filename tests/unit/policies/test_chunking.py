"""TensorRT-LLM's tables for its chunk policies: positions after each
iteration.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.policies.batch.two_stage import TwoStage, equal_progress, first_come

NO_LIMIT = 10_000
Share = Callable[[list[int], int, int, int], list[int]]


def positions(
    share: Share, lengths: list[int], unit: int, capacity: int, longest: int, iterations: int
) -> list[list[int]]:
    done, seen = [0] * len(lengths), []
    for _ in range(iterations):
        left = [length - at for length, at in zip(lengths, done, strict=True)]
        sizes = left
        if sum(left) > capacity or max(left) > longest:  # else there is nothing to share out
            sizes = share(left, unit, capacity, longest)
        done = [at + size for at, size in zip(done, sizes, strict=True)]
        seen.append(done)
    return seen


@pytest.mark.parametrize("share", [equal_progress, first_come])
@pytest.mark.parametrize(
    ("lengths", "unit", "capacity", "longest", "expected"),
    [
        ([25, 25], 20, NO_LIMIT, NO_LIMIT, [[25, 25]]),
        ([25, 25], 100, NO_LIMIT, 20, [[0, 0]]),
        ([25, 25], 30, NO_LIMIT, 25, [[25, 25]]),
        ([10, 25], 10, NO_LIMIT, 20, [[10, 20], [10, 25]]),
        ([25, 25], 20, 20, NO_LIMIT, [[20, 0], [25, 0], [25, 20], [25, 25]]),
        ([25, 25], 20, 10, NO_LIMIT, [[0, 0]]),
    ],
)
def test_prompts_that_both_rules_divide_alike(
    share: Share, lengths: list[int], unit: int, capacity: int, longest: int, expected: list[list[int]]
) -> None:
    assert positions(share, lengths, unit, capacity, longest, len(expected)) == expected


@pytest.mark.parametrize(
    ("lengths", "equal", "first"),
    [([25, 25], [[15, 15], [25, 25]], [[25, 5], [25, 25]]), ([25, 15], [[15, 15], [25, 15]], [[25, 5], [25, 15]])],
)
def test_prompts_that_the_two_rules_divide_differently(
    lengths: list[int], equal: list[list[int]], first: list[list[int]]
) -> None:
    assert positions(equal_progress, lengths, 5, 30, NO_LIMIT, 2) == equal
    assert positions(first_come, lengths, 5, 30, NO_LIMIT, 2) == first


def test_prompts_are_chunked_first_come_unless_equal_progress_is_chosen() -> None:
    assert TwoStage().share_out is first_come
    assert TwoStage(chunking="equal-progress").share_out is equal_progress
