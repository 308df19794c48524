"""The cache's events in the form of smg's contracts: several workers and tiers are one engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.third_party import smg_common_pb2 as smg
from paceline.v1 import cache_pb2 as pb
from services.gateway.grpc.kv_events import KvEventTranslator, NoTokens, block_hash

DEVICE, HOST = pb.CACHE_TIER_DEVICE, pb.CACHE_TIER_HOST


def stored(
    number: int, ids: list[int], worker: int = 1, tier: pb.CacheTier.ValueType = DEVICE, start: int = 0, parent: int = 0
) -> pb.WatchEventsResponse:
    tokens = np.array([[10 * i, 10 * i + 1] for i in ids], "<i4").tobytes()
    run = pb.BlockStored(
        worker=worker, prefix_ids=ids, token_ids=tokens, tier=tier, start_block=start, parent_prefix_id=parent
    )
    return pb.WatchEventsResponse(sequence_number=number, stored=run)


def removed(
    number: int, ids: list[int], worker: int = 1, tier: pb.CacheTier.ValueType = DEVICE
) -> pb.WatchEventsResponse:
    gone = pb.BlockRemoved(worker=worker, prefix_ids=ids, tier=tier)
    return pb.WatchEventsResponse(sequence_number=number, removed=gone)


def cleared(number: int, worker: int) -> pb.WatchEventsResponse:
    return pb.WatchEventsResponse(sequence_number=number, cleared=pb.WorkerCleared(worker=worker))


def snapshot(number: int, complete: bool, with_tokens: bool = True) -> pb.WatchEventsResponse:
    return pb.WatchEventsResponse(
        sequence_number=number, snapshot=pb.Snapshot(complete=complete, with_tokens=with_tokens)
    )


def begun(number: int = 100, *inside: pb.WatchEventsResponse) -> tuple[KvEventTranslator, list[smg.KvEventBatch]]:
    translator = KvEventTranslator()
    batches = []
    for message in (snapshot(number, False), *inside, snapshot(number, True)):
        batches += translator.take(message)
    return translator, batches


def only(batches: list[smg.KvEventBatch]) -> smg.KvEventBatch:
    [batch] = batches
    return batch


def hashes(event: smg.KvCacheEvent) -> list[int]:
    return [block.block_hash for block in event.stored.blocks] or list(event.removed.block_hashes)


def test_a_cache_that_sends_no_tokens_is_of_no_use() -> None:
    with pytest.raises(NoTokens, match="--event-tokens"):
        KvEventTranslator().take(snapshot(100, False, with_tokens=False))


def test_an_empty_snapshot_clears_what_the_router_knows() -> None:
    _, batches = begun()
    batch = only(batches)
    assert [event.WhichOneof("data") for event in batch.events] == ["cleared"]
    assert (batch.sequence_number, batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks) == (100, 0, 1, 0)


def test_the_last_batch_of_a_long_snapshot_has_the_number_of_the_snapshot() -> None:
    _, batches = begun(1000, *(stored(1000, [i]) for i in range(1, 201)))
    assert [batch.sequence_number for batch in batches] == list(range(1000 - len(batches) + 1, 1001))
    assert [(batch.snapshot.index, batch.snapshot.count) for batch in batches] == [
        (i, len(batches)) for i in range(len(batches))
    ]
    assert len(batches) > 2
    assert {batch.snapshot.blocks for batch in batches} == {200}
    assert sum(len(event.stored.blocks) for batch in batches for event in batch.events) == 200


def test_a_run_has_its_tokens_and_its_parent() -> None:
    translator, _ = begun()
    batch = only(translator.take(stored(101, [1, 2])))
    [event] = batch.events
    assert batch.sequence_number == 101
    assert [list(block.token_ids) for block in event.stored.blocks] == [[10, 11], [20, 21]]
    assert [block.block_size for block in event.stored.blocks] == [2, 2]
    assert not event.stored.HasField("parent_block_hash")  # the namespace is no block
    [event] = only(translator.take(stored(102, [3], start=2, parent=2))).events
    assert event.stored.parent_block_hash == 2


def test_a_block_is_stored_with_its_first_copy_and_removed_with_its_last() -> None:
    translator, _ = begun()
    translator.take(stored(101, [1, 2]))
    [event] = only(translator.take(stored(102, [1, 2, 3], worker=2))).events
    assert (hashes(event), event.stored.parent_block_hash) == ([3], 2)
    assert not only(translator.take(stored(103, [1], tier=HOST))).events
    assert not only(translator.take(removed(104, [1, 2]))).events
    assert hashes(only(translator.take(removed(105, [3, 2], worker=2))).events[0]) == [3, 2]
    assert not only(translator.take(removed(106, [1], worker=2))).events, "a copy is in the host memory of worker 1"
    assert hashes(only(translator.take(cleared(107, 1))).events[0]) == [1]
    assert not only(translator.take(removed(108, [1]))).events, "an unknown block"


def test_a_new_snapshot_forgets_the_state_before() -> None:
    translator, _ = begun(100, stored(100, [1]))
    batches = [
        *translator.take(snapshot(200, False)),
        *translator.take(stored(200, [1])),
        *translator.take(snapshot(200, True)),
    ]
    assert [event.WhichOneof("data") for event in only(batches).events] == ["cleared", "stored"]


def test_malformed_and_unknown_events_change_nothing_and_leave_no_gap() -> None:
    translator, _ = begun()
    uneven = pb.BlockStored(worker=1, prefix_ids=[1, 2], token_ids=b"\0" * 12)
    assert not only(translator.take(pb.WatchEventsResponse(sequence_number=101, stored=uneven))).events
    assert not only(translator.take(pb.WatchEventsResponse(sequence_number=102))).events


@pytest.mark.parametrize("seed", range(30))
def test_a_router_knows_exactly_the_blocks_that_some_worker_has(seed: int) -> None:
    rng = random.Random(seed)
    translator, _ = begun()
    held: dict[tuple[int, int], set[int]] = {(worker, tier): set() for worker in (1, 2, 3) for tier in (DEVICE, HOST)}
    known: set[int] = set()
    for number in range(101, 400):
        worker, tier = rng.choice(list(held))
        match rng.randrange(8):
            case 0:
                message = cleared(number, worker)
                for key in held:
                    if key[0] == worker:
                        held[key].clear()
            case 1 | 2 | 3:
                ids = [i for i in held[worker, tier] if rng.random() < 0.5]
                message = removed(number, ids, worker, pb.CacheTier.ValueType(tier))
                held[worker, tier] -= set(ids)
            case _:
                start = rng.randrange(1, 20)
                ids = list(range(start, start + rng.randrange(1, 8)))
                message = stored(number, ids, worker, pb.CacheTier.ValueType(tier))
                held[worker, tier] |= set(ids)
        batch = only(translator.take(message))
        assert batch.sequence_number == number
        for event in batch.events:
            if event.HasField("stored"):
                assert not known & set(hashes(event)), "stored twice"
                known |= set(hashes(event))
            else:
                assert set(hashes(event)) <= known, "removed, and not stored"
                known -= set(hashes(event))
        assert known == set().union(*held.values())


def test_hashes_are_signed() -> None:
    assert (block_hash(5), block_hash(2**63), block_hash(2**64 - 1)) == (5, -(2**63), -1)
