"""Cached and missed tokens of a prompt add up, whatever the cache says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.cache_pb2 import AdmitResult
from scheduler_svc.core.output.prefix_use import PrefixUse

sizes = st.integers(0, 200)


def missed(
    num_tokens: int, cached: int, block_size: int, whole: bool = False, told: Mapping[str, Any] = MappingProxyType({})
) -> list[tuple[str, int]]:
    granted = AdmitResult(num_cached_tokens=cached, **told)
    use = PrefixUse.of(granted, num_tokens, cached, block_size, needs_whole_prompt=whole)
    return [(one.reason, one.num_tokens) for one in use.missed()]


def test_the_reasons_come_in_the_order_of_the_prompt() -> None:
    told = {"num_other_worker_tokens": 8, "other_worker": 3, "num_in_flight_tokens": 4, "num_evicted_tokens": 12}
    assert missed(35, 4, 4, told=told) == [
        ("other_worker", 8),
        ("in_flight", 4),
        ("evicted", 12),
        ("new", 4),
        ("block_border", 3),
    ]
    use = PrefixUse(35, 4, 4, num_other_worker_tokens=8, other_worker=3)
    assert use.missed()[0].detail == "worker 3 has them"


def test_the_last_token_is_always_missed() -> None:
    assert missed(32, 28, 4) == [("block_border", 4)]
    assert missed(33, 32, 4) == [("block_border", 1)]
    assert missed(32, 31, 4) == [("block_border", 1)]  # the worker copied the beginning of the last block
    assert missed(32, 0, 4, whole=True) == [("whole_prompt", 32)]


def test_a_rounded_number_of_cached_tokens_hides_the_rest_in_the_reasons_too() -> None:
    """A prompt agrees with k tokens of a block that is evicted or elsewhere: each k gets the same answer."""
    for name in ("num_other_worker_tokens", "num_in_flight_tokens", "num_evicted_tokens"):
        answers = set()
        for k in range(8):
            told: dict[str, Any] = {name: 16 - k}
            granted = AdmitResult(num_cached_tokens=16 + k, **told)
            use = PrefixUse.of(granted, 50, 16, 16, needs_whole_prompt=False)
            answers.add(tuple((one.reason, one.num_tokens) for one in use.missed()))
        assert len(answers) == 1


@given(st.integers(1, 200), sizes, st.integers(1, 32), st.booleans(), sizes, sizes, sizes)
def test_all_tokens_are_explained(
    num_tokens: int, cached: int, block_size: int, whole: bool, other: int, in_flight: int, evicted: int
) -> None:
    cached = min(cached, num_tokens - 1)
    told = {"num_other_worker_tokens": other, "num_in_flight_tokens": in_flight, "num_evicted_tokens": evicted}
    found = missed(num_tokens, cached, block_size, whole, told)
    assert cached + sum(count for _, count in found) == num_tokens
    assert all(count > 0 for _, count in found)
    assert len({reason for reason, _ in found}) == len(found)
