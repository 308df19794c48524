"""Blocks that a step is planned to compute: shared within it, confirmed when it is sent, forgotten if it is not."""

from __future__ import annotations

from typing import Any

import pytest

from cache_svc.core.errors import Code
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused

A = list(range(100, 116))  # 4 blocks of 4 tokens


def link(num_blocks: int = 16, **changes: Any) -> Driver:
    made = Driver()
    made.add_worker(0, num_blocks, **({"partial_reuse": True} | changes))
    return made


def both(cache: Driver, planned: int = 20) -> tuple[pb.AdmitResult, pb.AdmitResult]:
    """Sequences 1 and 2, which begin with A, admitted in one exchange."""
    cache.match(1, [*A, 1, 1, 1, 1])
    cache.match(2, [*A, 2, 2])
    results = cache.exchange(d.admit_op(1, 0, planned=planned), d.admit_op(2, 0, planned=2)).results
    return results[0].admit, results[1].admit


def confirm(cache: Driver, *computed: tuple[int, int]) -> None:
    cache.one(d.commit_op([(sequence, [], num_tokens) for sequence, num_tokens in computed]))


def test_the_second_admission_of_an_exchange_shares_blocks_that_the_first_will_compute() -> None:
    cache = link()
    first, second = both(cache)
    assert (first.num_cached_tokens, first.shares_planned) == (0, False)
    assert (second.num_cached_tokens, second.shares_planned) == (16, True)
    assert d.unpack(second.block_table)[:4] == d.unpack(first.block_table)[:4]
    confirm(cache, (1, 20), (2, 18))
    cache.match(3, [*A, 3])
    third = cache.one(d.admit_op(3, 0)).admit
    assert (third.num_cached_tokens, third.shares_planned) == (16, False)
    cache.free(1, 2, 3)
    assert cache.pools[0][2] == 0


def test_no_more_than_is_planned_is_shared() -> None:
    cache = link()
    _, second = both(cache, planned=9)
    assert second.num_cached_tokens == 8


def test_blocks_of_an_unsent_step_are_forgotten_with_their_last_user() -> None:
    cache = link()
    both(cache)
    cache.free(1)
    assert cache.probe([*A, 9]) == {0: (16, 16)}
    cache.free(2)
    assert cache.pools[0][:3] == (16, 0, 0)
    assert cache.probe([*A, 9]) == {}


def test_a_confirmed_sequence_keeps_the_blocks_that_a_freed_sequence_was_to_write() -> None:
    cache = link()
    both(cache)
    confirm(cache, (2, 18))
    cache.free(1)
    cache.free(2)
    assert cache.probe([*A, 9]) == {0: (16, 0)}


def test_nothing_is_copied_from_a_block_that_is_yet_to_be_written() -> None:
    cache = link()
    cache.match(1, A)
    cache.match(2, [*A[:6], 7, 7, 7])
    cache.match(3, [*A[:6], 8, 8, 8])
    results = cache.exchange(d.admit_op(1, 0, planned=16), d.admit_op(2, 0)).results
    assert (results[1].admit.num_cached_tokens, results[1].admit.copy_from) == (4, 0)
    confirm(cache, (1, 16))
    third = cache.one(d.admit_op(3, 0)).admit
    assert (third.num_cached_tokens, third.copy_from) == (6, d.unpack(results[0].admit.block_table)[1])


def test_a_running_sequence_can_have_planned_tokens() -> None:
    cache = link()
    cache.match(1, A)
    cache.one(d.admit_op(1, 0, new_tokens=16, planned=4))
    confirm(cache, (1, 4))
    cache.match(2, [*A, 2])
    results = cache.exchange(d.commit_op([(1, [], 12)], planned=True), d.admit_op(2, 0)).results
    assert (results[1].admit.num_cached_tokens, results[1].admit.shares_planned) == (12, True)


def test_equal_blocks_of_two_planned_sequences_stay_apart() -> None:
    """If one of them is taken out of the step, the other one still has its own blocks."""
    for dropped, kept in ((1, 2), (2, 1)):
        cache = link()
        for sequence in (1, 2):
            cache.match(sequence, [*A, sequence])
            cache.one(d.admit_op(sequence, 0))
        cache.one(d.commit_op([(1, [], 16), (2, [], 16)], planned=True))
        cache.free(dropped)
        assert cache.probe([*A, 9]) == ({} if dropped == 1 else {0: (16, 16)})
        confirm(cache, (kept, 16))
        assert cache.probe([*A, 9]) == {0: (16, 16)}
        cache.free(kept)
        assert cache.pools[0][:3] == (12, 4, 0)


def test_a_refused_extension_aborts_the_planned_tokens_of_its_exchange() -> None:
    cache = link(num_blocks=3)
    cache.match(1, A[:8])
    cache.one(d.admit_op(1, 0))
    cache.match(2, A[8:10])
    results = cache.exchange(
        d.extend_op([1, 1]), d.commit_op([(1, [], 8)], planned=True), d.admit_op(2, 0, planned=2)
    ).results
    codes = [result.error.code for result in results]
    assert codes == [Code.RESOURCE_EXHAUSTED, Code.ABORTED, Code.ABORTED]
    cache.admit(2, 0)  # the next exchange may admit it


@pytest.mark.parametrize("planned", [2, 5])
def test_more_planned_tokens_than_the_blocks_hold_are_refused(planned: int) -> None:
    cache = link()
    cache.match(1, A)
    with pytest.raises(Refused, match="num_planned_tokens"):
        cache.one(d.admit_op(1, 0, new_tokens=1, planned=planned))
    cache.admit(1, 0)
    with pytest.raises(Refused, match="num_new_tokens"):
        cache.one(d.commit_op([(1, [5], 4)], planned=True))


def test_a_sequence_with_planned_tokens_can_be_neither_swapped_nor_forked() -> None:
    cache = link(num_host_blocks=8)
    both(cache)
    for op in (d.swap_out_op(1), d.fork_op(3, 0, 1)):
        cache.exchange(d.match_op(3, [*A, 1, 1, 1, 9]))
        with pytest.raises(Refused, match="not committed"):
            cache.one(op)
        cache.free(3)


def test_discard_keeps_nothing_without_another_user() -> None:
    cache = link(host_tier=True, num_host_blocks=8)
    cache.run(1, A)  # cached
    cache.match(2, [*A[:8], 2, 2, 2, 2, 2])
    cache.admit(2, 0)
    cache.commit(2, [], 12)
    cache.match(3, [*A[:4], 3])
    cache.admit(3, 0)
    cache.one(d.free_op([2], discard=True))
    # Sequence 3 uses the first block. The rest of the path is gone, with the cached blocks below it.
    assert cache.probe([*A, 9]) == {0: (4, 4)}
    assert cache.probe([*A[:8], 2, 2, 2, 2, 9]) == {0: (4, 4)}
