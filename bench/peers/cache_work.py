"""The workload of bench/cache/cache.py: the same sequences and calls for the prefix caches of Paceline and SGLang.

The environments of both systems import this module, so it needs numpy only. A sequence has 1,024 tokens: 512 are one of
16 system prompts, 256 belong to a session of 8 sequences, and 256 are its own. At 1,000 sequences, 71 % of the tokens
are shared.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bench.peers.quiet import no_collections

Tokens = npt.NDArray[np.int64]
Samples = dict[str, list[float]]  # microseconds, by figure

FAMILIES, SYSTEM, SESSION, OWN, PER_SESSION = 16, 512, 256, 256, 8
LENGTH = SYSTEM + SESSION + OWN
LONG, NUM_LONG = 3_000, 64
WORKERS, MAX_HOLDERS = 8, 3
BATCH = 16  # requests matched at once for 8 workers


class Work:
    """`sequences` are stored, in this random order; measure_calls also stores `long`. The other lists are arguments of
    the measured calls."""

    def __init__(self, num_sequences: int, times: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.times = times
        self.systems = self._tokens(FAMILIES, SYSTEM)
        self.sessions = self._tokens(-(-num_sequences // PER_SESSION), SESSION)
        own = self._tokens(num_sequences, OWN)
        order = self.rng.permutation(num_sequences).tolist()
        self.sequences = [self._sequence(i // PER_SESSION, own[i]) for i in order]
        self.long = [np.concatenate((self.systems[0], own)) for own in self._tokens(NUM_LONG, LONG - SYSTEM)]
        # New tokens have other ids than the stored ones, so that nothing is shared by chance.
        self.hits = [self.asked(self.sequences[i]) for i in self._some(num_sequences)]
        self.long_hits = [self.asked(self.long[i]) for i in self._some(NUM_LONG)]
        self.partial = [self._sequence(i // PER_SESSION, self._new(OWN + 1)) for i in self._some(num_sequences)]
        self.misses = [self._new(LENGTH + 1) for _ in range(times)]
        self.inserts = [self._sequence(i // PER_SESSION, self._new(OWN)) for i in self._some(num_sequences)]
        self.new_inserts = [self._new(LENGTH) for _ in range(times)]

    @property
    def num_tokens(self) -> int:
        """An upper limit for the tokens in the cache, with all inserts: shared tokens count once per sequence."""
        return (len(self.sequences) + 2 * self.times) * LENGTH + NUM_LONG * LONG

    def asked(self, stored: Tokens) -> Tokens:
        """The stored tokens and one more: a model computes at least one token, so a match never includes the last."""
        return np.concatenate((stored, self._new(1)))

    def holders(self) -> list[list[int]]:
        """For each sequence, the workers that have all of it."""
        counts = self.rng.integers(1, MAX_HOLDERS + 1, len(self.sequences)).tolist()
        return [self.rng.permutation(WORKERS)[:count].tolist() for count in counts]

    def _sequence(self, session: int, own: Tokens) -> Tokens:
        return np.concatenate((self.systems[session % FAMILIES], self.sessions[session], own))

    def _some(self, count: int) -> list[int]:
        return [int(i) for i in self.rng.integers(count, size=self.times)]

    def _tokens(self, *shape: int) -> Tokens:
        return self.rng.integers(1, 1 << 28, shape)

    def _new(self, count: int) -> Tokens:
        return self.rng.integers(1 << 28, 1 << 29, count)


class Cache(Protocol):
    """One memory's prefix cache. The arguments of a call are made before (`key`, `to_insert`, ...) and not measured."""

    def key(self, tokens: Tokens) -> Any: ...
    def match(self, key: Any) -> Any:
        """Where the longest stored prefix ends, and how long it is."""

    def to_insert(self, tokens: Tokens) -> Any: ...
    def insert(self, made: Any) -> Any: ...
    def inserted(self, made: Any) -> None:
        """The inserted sequence has no user any more."""

    def to_lock(self, tokens: Tokens) -> Any: ...
    def lock_unlock(self, place: Any) -> Any: ...
    def lock_table_unlock(self, place: Any) -> Any:
        """Locks a path, reads its blocks, and unlocks it."""

    def fill_up(self) -> None:
        """Takes all free blocks, so that the next allocation evicts blocks."""

    def evict(self, num_tokens: int) -> Any: ...


def timed(call: Callable[[Any], Any], arguments: Iterable[Any]) -> list[float]:
    """Microseconds of each call, without the first tenth, which is the warm-up."""
    arguments = list(arguments)
    samples: list[float] = []
    clock = time.perf_counter
    for argument in arguments:
        began = clock()
        call(argument)
        samples.append((clock() - began) * 1e6)
    return samples[len(arguments) // 10 :]


def store(cache: Cache, sequences: Iterable[Tokens]) -> None:
    for tokens in sequences:
        made = cache.to_insert(tokens)
        cache.insert(made)
        cache.inserted(made)


def measure_calls(cache: Cache, work: Work) -> Samples:
    """Measures every call except `evict`, on a tree of all sequences."""
    store(cache, work.sequences)
    store(cache, work.long)
    asked = {"match_hit_1024": work.hits, "match_partial_768_of_1024": work.partial, "match_miss_1024": work.misses}
    samples = {}
    with no_collections():
        for name, sequences in {**asked, "match_3000": work.long_hits}.items():
            samples[name] = timed(cache.match, map(cache.key, sequences))
        for name, sequences in {"insert_1024": work.inserts, "insert_new_1024": work.new_inserts}.items():
            made = [cache.to_insert(tokens) for tokens in sequences]
            samples[name] = timed(cache.insert, made)
            for one in made:
                cache.inserted(one)
        places = [cache.to_lock(tokens) for tokens in work.hits]
        samples["lock_unlock_1024"] = timed(cache.lock_unlock, places)
        samples["lock_table_unlock_1024"] = timed(cache.lock_table_unlock, places)
    return samples


def measure_evict(cache: Cache, work: Work) -> Samples:
    store(cache, work.sequences)
    cache.fill_up()
    times = min(work.times, len(work.sequences) * OWN // LENGTH)
    with no_collections():
        return {f"evict_1024_at_{len(work.sequences)}": timed(cache.evict, [LENGTH] * times)}


def bytes_of(cache: Cache, work: Work, block_size: int) -> float:
    """The bytes of a stored block: the growth of a child process's resident memory, divided by the number of distinct
    stored blocks."""
    num_tokens = work.systems.size + work.sessions.size + len(work.sequences) * OWN
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        gc.disable()
        ctypes.CDLL(None).malloc_trim(
            0
        )  # otherwise the tree would grow into freed memory, and the growth would not be seen
        before = resident_bytes()
        store(cache, work.sequences)
        os.write(writes, str(resident_bytes() - before).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        grown = int(answer.read())
    os.waitpid(child, 0)
    return grown / (num_tokens / block_size)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
