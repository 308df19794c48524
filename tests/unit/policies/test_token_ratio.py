"""SGLang's admission by a share of the tokens that may still be generated: the edge cases of its rule."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.test_placement import Recorder, submit_at_once, system_of


@pytest.mark.parametrize(("num_blocks", "admitted"), [(10, ["1"]), (11, ["1", "2"])])
def test_a_request_needs_less_than_the_tokens_that_are_left(num_blocks: int, admitted: list[str]) -> None:
    """Each request needs 20 tokens: its prompt of 8, a spare block of 4, and the 8 tokens that it may generate. After
    the first one, ten blocks have exactly 20 tokens left, which is not enough."""
    worker = Recorder(num_blocks=num_blocks)
    system = system_of([worker], "sglang")
    submit_at_once(system, [[9] * 8, [10] * 8], max_tokens=8)
    system.run()
    assert next(names for names in worker.let_in if names) == admitted
