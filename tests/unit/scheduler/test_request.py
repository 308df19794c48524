"""A request and the parent that it forks from."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.requests.request import Request

PROMPT = bytes(4 * 10)


def request(handle: int) -> Request:
    return Request(handle, "s", handle, f"r{handle}", PROMPT, bytearray(), SamplingParams(max_tokens=4), arrival_s=0.0)


@pytest.mark.parametrize(("worker", "is_computed", "num_tokens"), [(1, True, 9), (1, False, 0), (2, True, 0)])
def test_a_request_forks_only_on_its_parents_worker_once_the_prompt_is_computed(
    worker: int, is_computed: bool, num_tokens: int
) -> None:
    parent, fork = request(1), request(2)
    parent.held.worker, parent.held.prompt_is_computed = 1, is_computed
    fork.family.parent = parent
    assert fork.can_fork_on(worker) == (num_tokens > 0)
    assert fork.match_on(worker).num_tokens == num_tokens
