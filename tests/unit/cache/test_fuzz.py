"""The core under operations that make no sense: each gets a result, a refused one changes nothing, and a valid client
is served as usual.
"""

from __future__ import annotations

from random import Random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc.core import admin
from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code, LinkError, OpError
from cache_svc.core.memory.eviction import STRATEGIES
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.garbage import UINT64, Garbage, digest, watch_refusals

EPOCH = 7
RESULTS = {
    "match": "match",
    "admit": "admit",
    "extend": "extend",
    "swap_out": "swap_out",
    "swap_in": "swap_in",
    "restore": "restore",
}
HONEST = 5000  # the garbage uses no sequence id near this one


def exchange(core: CacheCore, ops: list[pb.CacheOp], now_ms: int = 0) -> pb.CacheServiceLinkResponse:
    number = core.last_exchange + 1
    return core.exchange(pb.CacheServiceLinkRequest(epoch=EPOCH, exchange=number, ops=ops, now_ms=now_ms))


def check_response(core: CacheCore, ops: list[pb.CacheOp], response: pb.CacheServiceLinkResponse) -> None:
    """Properties of every response."""
    assert len(response.results) == len(ops)
    workers_change = any(op.WhichOneof("op") in ("add_worker", "remove_worker") for op in ops)
    for op, result in zip(ops, response.results, strict=True):
        kind = op.WhichOneof("op")
        if result.HasField("error"):
            assert Code(result.error.code)
            assert 0 < len(result.error.message) < 500
        else:
            assert result.WhichOneof("result") == RESULTS.get(kind or "") or op.restore.incomplete
            admit = result.swap_in.admit if kind == "swap_in" else result.admit
            if kind in ("admit", "swap_in") and not workers_change:
                assert core.tree is not None
                assert len(admit.block_table) // 4 * core.tree.block_size > admit.num_cached_tokens
    for pool in [*response.pools, *core.present_counters()]:
        worker = core.workers[pool.worker]
        assert pool.free_blocks + pool.cached_blocks + pool.used_blocks == worker.device.num_blocks
        assert pool.free_host_blocks + pool.cached_host_blocks + pool.used_host_blocks == worker.host.num_blocks
    assert response.SerializeToString()


def serve_honestly(core: CacheCore, sequence: int) -> None:
    """Adds a worker, runs a prompt on it, finds the prompt again, removes the worker."""
    worker = next(w for w in range(100, 200) if w not in core.workers)
    block_size = core.tree.block_size if core.tree is not None else 2
    if block_size > 100:
        return  # a huge block size, of the test or of the garbage: no prompt has a whole block
    prompt = [sequence] * (3 * block_size) + [1]
    begin = [d.add_worker_op(worker, 8, block_size), d.match_op(sequence, prompt), d.admit_op(sequence, worker)]
    response = exchange(core, begin)
    assert not any(result.HasField("error") for result in response.results)
    assert d.unpack(response.results[2].admit.block_table) == [1, 2, 3, 4]
    end = [d.commit_op([(sequence, [], len(prompt))]), d.free_op([sequence]), d.match_op(sequence + 1, prompt)]
    response = exchange(core, [*end, d.free_op([sequence + 1]), d.remove_worker_op(worker)])
    assert not any(result.HasField("error") for result in response.results)
    (found,) = response.results[2].match.matches
    assert (found.worker, found.num_tokens) == (worker, 3 * block_size)


# A seed, because hypothesis' own randomness is five times slower. Shrinking reduces the number of exchanges.
@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rounds=st.integers(1, 60),
    eviction=st.sampled_from(list(STRATEGIES)),
    block_size=st.sampled_from([1, 2, 3, 2**32 - 1]),
)
def test_random_operations_keep_the_core_consistent(seed: int, rounds: int, eviction: str, block_size: int) -> None:
    rng = Random(seed)
    core = CacheCore(debug=True, eviction=eviction, max_pinned_share=0.6)
    watch_refusals(core)
    garbage = Garbage(rng, core)
    kind = True, 8, bool(rng.randrange(2)), bool(rng.randrange(2))
    exchange(core, [d.add_worker_op(worker, 12, block_size, *kind) for worker in (0, 1)])
    for i in range(rounds):
        ops = garbage.ops()
        now_ms = rng.choice([0, 5, 10, 10 * i, UINT64])
        check_response(core, ops, exchange(core, ops, now_ms))
        if not rng.randrange(8):
            pin_or_unpin(core, garbage)
        if not rng.randrange(8):
            break_the_numbering(core, garbage)
        if not rng.randrange(15):
            serve_honestly(core, HONEST + 2 * i)
    serve_honestly(core, HONEST - 2)
    known = [*core.waiting, *core.admitted, *core.swapped]
    response = exchange(core, [d.free_op(known)])
    assert not response.results[0].HasField("error")
    for name in list(core.pins.by_name):
        admin.unpin(core, name)
    core.check_invariants()
    for worker in core.workers.values():
        assert worker.device.used_blocks == worker.host.used_blocks == 0


def pin_or_unpin(core: CacheCore, garbage: Garbage) -> None:
    name = garbage.rng.choice(["", "one", "two"])
    before = digest(core)
    try:
        if garbage.rng.randrange(3):
            workers = garbage.rng.choice([[], [garbage.worker()]])
            admin.pin(core, name, garbage.tokens(), worker_ids=workers)
        else:
            admin.unpin(core, name)
    except OpError:
        assert digest(core) == before
    core.check_invariants()


def break_the_numbering(core: CacheCore, garbage: Garbage) -> None:
    """An exchange with a wrong number or epoch has no effect."""
    last, before = core.last_exchange, digest(core)
    number = garbage.rng.choice([0, last, last + 2, UINT64])
    epoch = garbage.rng.choice([EPOCH, 0, UINT64])
    if epoch != EPOCH:
        number = last + 1
    request = pb.CacheServiceLinkRequest(epoch=epoch, exchange=number, ops=garbage.ops(), now_ms=99)
    with pytest.raises(LinkError):
        core.exchange(request)
    assert (core.last_exchange, digest(core)) == (last, before)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_bytes_that_happen_to_be_a_message(noise: bytes, cut: int) -> None:
    """Unknown fields, ops with several kinds, half a message: the core answers whatever the parser accepts."""
    core = CacheCore(debug=True)
    watch_refusals(core)
    begin = [d.add_worker_op(0, 8, 2), d.match_op(1, [1] * 5), d.admit_op(1, 0)]
    exchange(core, begin)
    ops = [d.commit_op([(1, [2], 5)]), d.match_op(2, [1] * 5), d.free_op([1])]
    message = pb.CacheServiceLinkRequest(epoch=EPOCH, exchange=2, ops=ops).SerializeToString()
    at = cut % (len(message) + 1)
    for spoilt in (message + noise, message[:at] + noise + message[at:], message[:at] + noise):
        try:
            request = pb.CacheServiceLinkRequest.FromString(spoilt)
        except DecodeError:
            continue
        request.exchange, request.epoch = core.last_exchange + 1, EPOCH
        check_response(core, list(request.ops), core.exchange(request))
    serve_honestly(core, HONEST)
