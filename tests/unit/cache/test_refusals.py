"""Every malformed operation: which code it gets, and that it changes nothing."""

from __future__ import annotations

import pytest

from cache_svc.core.errors import Code
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused

A = list(range(100, 116))
B = list(range(200, 216))

BAD_OPS = {
    "no operation": (pb.CacheOp(), Code.INVALID_ARGUMENT),
    "worker added twice": (d.add_worker_op(0, 16, 4), Code.ALREADY_EXISTS),
    "another block size": (d.add_worker_op(1, 16, 8), Code.FAILED_PRECONDITION),
    "no blocks": (d.add_worker_op(1, 0, 4), Code.INVALID_ARGUMENT),
    "too many blocks": (d.add_worker_op(1, 2**31, 4), Code.INVALID_ARGUMENT),
    "no block size": (d.add_worker_op(1, 16, 0), Code.INVALID_ARGUMENT),
    "remove an unknown worker": (d.remove_worker_op(9), Code.NOT_FOUND),
    "match one that waits": (d.match_op(2, A), Code.ALREADY_EXISTS),
    "match one that runs": (d.match_op(1, A), Code.ALREADY_EXISTS),
    "match no tokens": (d.match_op(3, []), Code.INVALID_ARGUMENT),
    "match half a token": (pb.CacheOp(match=pb.MatchOp(sequence=3, token_ids=b"12345")), Code.INVALID_ARGUMENT),
    "match with priority NaN": (d.match_op(3, A, float("nan")), Code.INVALID_ARGUMENT),
    "match with infinite priority": (d.match_op(3, A, float("inf")), Code.INVALID_ARGUMENT),
    "admit an unknown one": (d.admit_op(3, 0), Code.NOT_FOUND),
    "admit twice": (d.admit_op(1, 0), Code.FAILED_PRECONDITION),
    "admit to an unknown worker": (d.admit_op(2, 9), Code.NOT_FOUND),
    "extend an unknown one": (d.extend_op([1, 3]), Code.NOT_FOUND),
    "extend one that waits": (d.extend_op([1, 2]), Code.FAILED_PRECONDITION),
    "extend beyond the pool": (d.extend_op([1] * 15), Code.RESOURCE_EXHAUSTED),
    "commit an unknown one": (d.commit_op([(1, [5], 6), (3, [], 0)]), Code.NOT_FOUND),
    "commit one that waits": (d.commit_op([(1, [5], 6), (2, [], 0)]), Code.FAILED_PRECONDITION),
    "commit beyond the tokens": (d.commit_op([(1, [5], 8)]), Code.INVALID_ARGUMENT),
    "commit beyond the blocks": (d.commit_op([(1, A, 9)]), Code.INVALID_ARGUMENT),
    "commit backwards": (d.commit_op([(1, [], 4)]), Code.INVALID_ARGUMENT),
    "commit of unequal lists": (
        pb.CacheOp(commit=pb.CommitOp(sequences=[1], num_computed_tokens=[5])),
        Code.INVALID_ARGUMENT,
    ),
    "commit with tokens of no sequence": (
        pb.CacheOp(
            commit=pb.CommitOp(sequences=[1], num_new_tokens=[1], num_computed_tokens=[5], token_ids=d.pack([1, 2]))
        ),
        Code.INVALID_ARGUMENT,
    ),
    "commit with half a token": (
        pb.CacheOp(commit=pb.CommitOp(sequences=[1], num_new_tokens=[1], num_computed_tokens=[5], token_ids=b"12345")),
        Code.INVALID_ARGUMENT,
    ),
    "free an unknown one": (d.free_op([1, 2, 3]), Code.NOT_FOUND),
    "swap out an unknown one": (d.swap_out_op(3), Code.NOT_FOUND),
    "swap out one that waits": (d.swap_out_op(2), Code.FAILED_PRECONDITION),
    "swap out beyond the host pool": (d.swap_out_op(1), Code.RESOURCE_EXHAUSTED),
    "swap in an unknown one": (d.swap_in_op(3), Code.NOT_FOUND),
    "swap in one that waits": (d.swap_in_op(2), Code.FAILED_PRECONDITION),
    "swap in a sequence that is not swapped out": (d.swap_in_op(1), Code.FAILED_PRECONDITION),
    "too many host blocks": (d.add_worker_op(1, 16, 4, True, 2**31), Code.INVALID_ARGUMENT),
    "free twice": (d.free_op([1, 2, 1]), Code.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("name", BAD_OPS)
def test_a_refused_operation_changes_nothing_and_others_succeed(name: str) -> None:
    link = Driver()
    link.add_worker(0, num_blocks=16, num_host_blocks=1)
    op, code = BAD_OPS[name]
    link.start(1, A[:6])
    link.commit(1, [], 5)
    link.match(2, B)
    response = link.exchange(op, d.match_op(4, B), op)
    assert [result.WhichOneof("result") for result in response.results] == ["error", "match", "error"]
    assert [result.error.code for result in response.results] == [code, 0, code]
    assert response.results[0].error.message
    assert not response.pools
    assert link.core.counters.refused_ops == 2
    sequence = link.core.admitted[1]
    assert (sequence.num_tokens, sequence.num_computed_tokens, list(sequence.table)) == (6, 5, [1, 2])
    assert link.core.waiting.keys() == {2, 4}
    assert link.core.workers.keys() == {0}


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more"), (1000, " and 992 more")])
def test_an_error_names_the_first_unknown_sequences_and_counts_the_others(count: int, more: str) -> None:
    link = Driver()
    with pytest.raises(Refused) as refused:
        link.free(*range(count))
    assert str(refused.value) == f"not known: sequences 0, 1, 2, 3, 4, 5, 6, 7{more}; nothing was freed"
