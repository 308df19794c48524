"""Which requests share cached KV, what clients learn of it, and what workers and the cache get in place of a salt."""

from __future__ import annotations

import itertools
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from scheduler_svc.core.cache.namespaces import CacheNamespaces
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

SAMPLING = SamplingParams(top_p=1.0, max_tokens=2, seed=1, ignore_eos=True)
PROMPT = list(range(10, 30))
BLOCK_SIZE = 4
texts = st.text(st.sampled_from("ab\0é"), max_size=3)


def make(**config: Any) -> LocalSystem:
    system = LocalSystem(SchedulerConfig(**config))
    worker = ToyWorker(block_size=BLOCK_SIZE, num_blocks=1024, max_num_seqs=8, max_batched_tokens=64)
    system.attach(worker)
    system.open("s")
    return system


def cached_tokens(system: LocalSystem, handle: int, prompt: list[int] = PROMPT, **fields: Any) -> int:
    system.submit("s", handle, prompt, SAMPLING, **fields)
    system.run()
    return system.clients["s"].endings[handle].cached_tokens


def test_another_tenant_finds_nothing_however_much_it_guesses() -> None:
    """The attack that recovered a prompt token by token: the guesses agree with more and more of it."""
    system = make()
    assert cached_tokens(system, 1, tenant="victim") == 0
    guesses = [[*PROMPT[:length], *range(500 + length, 510 + length)] for length in range(1, len(PROMPT) + 1)]
    for handle, guess in enumerate([*guesses, PROMPT], start=2):
        assert cached_tokens(system, handle, guess, tenant=f"attacker {handle}") == 0
    others = [("", ""), ("", "victim"), ("victim", "x")]
    for handle, (tenant, salt) in enumerate(others, start=50):
        assert cached_tokens(system, handle, tenant=tenant, cache_salt=salt) == 0
    assert cached_tokens(system, 60, tenant="victim") == len(PROMPT) - 1, "the victim itself still finds its prompt"
    assert cached_tokens(system, 61, tenant="victim", cache_salt="x") == len(PROMPT) - 1
    assert cached_tokens(system, 62) == len(PROMPT) - 1, "requests without a tenant find theirs, too"


def test_requests_that_arrive_together_share_within_a_tenant_only() -> None:
    """One step computes a common beginning once, and a beginning of another tenant again."""
    computed = {}
    for tenants in ("ab", "aa", ""):
        system = make()
        for handle, tenant in enumerate(tenants or ("", ""), start=1):
            system.submit("s", handle, PROMPT, SAMPLING, tenant=tenant)
        system.run()
        worker = system.workers[0].worker
        assert isinstance(worker, ToyWorker)
        computed[tenants] = worker.num_computed
    assert computed["aa"] == computed[""] == computed["ab"] - len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE


def test_with_one_cache_for_all_tenants_cached_tokens_are_rounded_down_to_blocks() -> None:
    system = make(cache_scope="server")
    assert cached_tokens(system, 1, tenant="victim") == 0
    found = [
        cached_tokens(system, 100 + length, [*PROMPT[:length], 900 + length], tenant=f"t{length}")
        for length in range(1, 20)
    ]
    assert found == [length // BLOCK_SIZE * BLOCK_SIZE for length in range(1, 20)]
    assert cached_tokens(system, 3, tenant="victim", cache_salt="x") == 0
    assert cached_tokens(system, 4, tenant="other", cache_salt="x") == 16


@pytest.mark.parametrize("scope", ["tenant", "server"])
def test_rounding_of_cached_tokens_does_not_change_what_is_computed(scope: Any) -> None:
    """What a worker computes is what is not cached, in both scopes."""
    system = make(cache_scope=scope)
    worker = system.workers[0].worker
    assert isinstance(worker, ToyWorker)
    cached_tokens(system, 1)
    before = worker.num_computed
    cached_tokens(system, 2)
    assert worker.num_computed - before == 1 + SAMPLING.max_tokens - 1


def test_neither_worker_nor_cache_learns_a_salt_or_a_tenant() -> None:
    system = make()
    system.scheduler.namespaces.secret = b"k" * 32
    seen: list[bytes] = []
    system.submit("s", 1, PROMPT, SAMPLING, tenant="acme corp", cache_salt="pepper and salt")
    beam = BeamOptions(width=2)
    system.submit(
        "s", 2, PROMPT, SamplingParams(max_tokens=3), tenant="acme corp", cache_salt="pepper and salt", beam=beam
    )
    while moves := system.moves():
        seen += [message.SerializeToString() for message in system.to_cache]
        seen += [plan.SerializeToString() for end in system.workers for plan in end.plans]
        system.move(*moves[0])
    everything = b"".join(seen)
    name = system.scheduler.namespaces.name("acme corp", "pepper and salt")
    assert name.encode() in everything
    assert b"pepper" not in everything
    assert b"acme" not in everything
    assert name not in {
        CacheNamespaces("tenant", bytes([letter]) * 32).name("acme corp", "pepper and salt") for letter in range(99)
    }


@given(st.lists(st.tuples(texts, texts), min_size=2, max_size=6, unique=True), st.binary(min_size=16, max_size=64))
def test_each_pair_of_tenant_and_salt_has_its_own_name(pairs: list[tuple[str, str]], secret: bytes) -> None:
    namespaces = CacheNamespaces("tenant", secret)
    names = [namespaces.name(*pair) for pair in pairs]
    assert len(set(names)) == len(pairs)
    for (tenant, salt), name in zip(pairs, names, strict=True):
        assert CacheNamespaces("tenant", secret).name(tenant, salt) == name, "after a restart, and on a standby"
        assert bool(name) == bool(tenant or salt)
        assert set(name) <= set(string.hexdigits.lower())
        assert CacheNamespaces("server", secret).name(tenant, salt) == namespaces.name("", salt)
    by_secret = [CacheNamespaces("tenant", secret[:-1] + bytes([last])).name("t", "s") for last in (1, 2, 3)]
    assert all(one != other for one, other in itertools.combinations(by_secret, 2))


def test_a_secret_is_not_in_a_log() -> None:
    assert "hidden" not in repr(CacheNamespaces("tenant", b"hidden"))
