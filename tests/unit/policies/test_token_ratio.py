"""SGLang's admission by a share of the tokens that may still be generated: the edge cases of its rule."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.test_placement import Recorder, submit_at_once, system_of


@pytest.mark.parametrize(("num_blocks", "admitted"), [(10, ["1"]), (11, ["1", "2"])])
def test_a_request_needs_less_than_the_tokens_that_are_left(num_blocks: int, admitted: list[str]) -> None:
    """The first request takes 3 blocks of 4 tokens and an allowance of 8 tokens. The second one also needs 20 tokens:
    exactly what is left of ten blocks."""
    worker = Recorder(num_blocks=num_blocks)
    system = system_of([worker], "sglang")
    submit_at_once(system, [[9] * 8, [10] * 8], max_tokens=8)
    system.run()
    assert next(names for names in worker.let_in if names) == admitted
