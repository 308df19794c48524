"""The simulator's own checks: each check finds its kind of error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cache_svc.core.cache import CacheCore
from paceline.v1.cache_pb2 import CacheServiceLinkRequest
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from simulator.exchanges import check_plan
from simulator.toy_worker import Corruption, ToyWorker
from tests.unit.cache.driver import add_worker_op, admit_op, match_op


def packed(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def new(slot: int, tokens: bytes, cached: int, table: bytes) -> NewSequence:
    return NewSequence(
        slot=slot,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) // 4,
        num_cached_tokens=cached,
        block_table=table,
        sampling=SamplingParams(max_tokens=5, ignore_eos=True),
    )


def prefill(step: int, sequence: NewSequence) -> StepPlan:
    todo = sequence.num_prompt_tokens - sequence.num_cached_tokens
    slot = packed(sequence.slot)
    return StepPlan(
        step=step, new_sequences=[sequence], prefill_slots=slot, prefill_tokens=packed(todo), skip_decodes=True
    )


@pytest.fixture
def toy() -> ToyWorker:
    """Slot 0 has computed a prompt of six tokens, in blocks 1 and 2."""
    toy = ToyWorker(block_size=4, num_blocks=8, max_num_seqs=4, max_batched_tokens=32)
    toy.run(prefill(1, new(0, packed(1, 2, 3, 4, 5, 6), 0, packed(1, 2))))
    return toy


@pytest.mark.parametrize(
    ("cached", "table", "written"),
    [
        (0, packed(1, 3), "block 1 is written again, at position 0"),
        (4, packed(1, 2), "block 2 is written again, at position 0"),
    ],
    ids=["a block that is full", "the filled positions of a partial block"],
)
def test_a_worker_notices_a_write_to_a_block_of_another_sequence(
    toy: ToyWorker, cached: int, table: bytes, written: str
) -> None:
    """The check also finds a write of equal content, as here."""
    with pytest.raises(Corruption, match=written):
        toy.run(prefill(2, new(1, packed(1, 2, 3, 4, 5, 6), cached, table)))


def test_a_block_may_be_read_by_another_sequence(toy: ToyWorker) -> None:
    toy.run(prefill(2, new(1, packed(1, 2, 3, 4, 5, 6), 4, packed(1, 3))))
    assert toy.slots[1].num_computed == 6


@pytest.fixture
def cache() -> CacheCore:
    """Worker 5 runs sequence 1 in block 1."""
    ops = [add_worker_op(5, num_blocks=8, block_size=4), match_op(1, [1, 2, 3]), admit_op(1, worker=5)]
    cache = CacheCore()
    response = cache.exchange(CacheServiceLinkRequest(epoch=1, exchange=1, ops=ops))
    assert not [result.error for result in response.results if result.HasField("error")]
    assert cache.admitted[1].table.tolist() == [1]
    return cache


PLANS: dict[str, Callable[[bytes], StepPlan]] = {
    "grow": lambda block: StepPlan(grow_slots=packed(0), grow_blocks=block),
    "copy": lambda block: StepPlan(copy_from=packed(1), copy_to=block),
    "swap in": lambda block: StepPlan(swap_in_from=packed(1), swap_in_to=block),
    "new": lambda block: StepPlan(new_sequences=[NewSequence(block_table=block)]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_plan_names_only_blocks_that_the_cache_has_granted_to_that_worker(
    cache: CacheCore, plan: Callable[[bytes], StepPlan]
) -> None:
    check_plan(cache, 5, plan(packed(1)))
    with pytest.raises(AssertionError, match=r"names the blocks \[2\], which the cache has not granted to worker 5"):
        check_plan(cache, 5, plan(packed(2)))
    with pytest.raises(AssertionError, match="worker 6"):
        check_plan(cache, 6, plan(packed(1)))
