"""Which sequences `largest-share` preempts. The effects: tests/unit/scheduler/test_request_shares.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.policies.preemption.largest_share import LargestShare


@pytest.mark.parametrize(("need", "expected"), [(1, "f"), (3, "f"), (4, "fe"), (6, "fe"), (7, "fed")])
def test_samples_are_preempted_until_there_are_enough_blocks(need: int, expected: str) -> None:
    """Six samples of one request run, with three blocks each, and slots are free."""
    samples = SimpleNamespace(client_request=1, num_running_siblings=6)
    newcomer = SimpleNamespace(num_running_siblings=0, is_swapped=False)
    step: Any = SimpleNamespace(
        waiting=lambda: iter([newcomer]),
        has_admitted=lambda request: False,
        goes_before=lambda one, other: True,
        num_free_slots=2,
        need_blocks=lambda request, num_tokens: need,
        uncached_tokens=lambda request: 9,
        running=[SimpleNamespace(name=name, request=samples, num_blocks=3) for name in "abcdef"],
    )
    victims: list[Any] = list(LargestShare().for_waiting(step))
    assert "".join(victim.name for victim in victims) == expected
