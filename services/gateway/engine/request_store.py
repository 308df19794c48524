"""Which connection reads which runs. Requests without an idempotency key end with their connection. Other requests wait
for a client.

         submit                    connection lost                  all ended
    ──────────────▶  being read  ──────────────────▶  waiting  ─────────────────▶  finished
                         ▲                             │   │                         │   │
                         └───────── the same key ──────┼───┼─────────────────────────┘   │
                                                       ▼   └── grace is over: cancelled   └── too old, or too many
                                                     failed: forgotten, so that a retry runs again

An INTERNAL error also counts as finished: a request that kills its workers must not run again for a retry. If an answer
is still being read, its key moves to the newest connection, because a client comes back before the server notices that
the old connection is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.gateway.engine.generation import Generation
from services.gateway.engine.idempotency import RequestKey
from services.gateway.engine.sequence_run import SequenceRun
from services.gateway.errors import ApiError

K = TypeVar("K")
V = TypeVar("V")

MAX_FINISHED = 4096
# Clients that start requests and leave must not fill the server with answers that no client reads. Both limits are
# shared between the owners (API keys): beyond a limit, the owner with the most entries loses its oldest one.
MAX_WAITING = 256


class Reading:
    """All sequences of a request as one connection reads them. Always call `close()` at the end."""

    __slots__ = ("_release", "created_s", "generations")

    def __init__(self, runs: Sequence[SequenceRun], created_s: int, release: Callable[[Reading], None]) -> None:
        self.generations = [Generation(run) for run in runs]
        self.created_s = created_s  # Unix time
        self._release = release

    def interrupt(self, error: Exception) -> None:
        """Make every reader of this request raise the error."""
        for generation in self.generations:
            generation.interrupt(error)

    def close(self) -> None:
        """Stop reading. Safe to call again."""
        for generation in self.generations:
            generation.close()
        self._release(self)


def read_once(runs: Sequence[SequenceRun]) -> Reading:
    """The reading of a request without a key. Closing it cancels the runs that have not ended."""

    def release(_: Reading) -> None:
        for run in runs:
            run.close()

    return Reading(runs, int(time.time()), release)


@dataclass(slots=True, eq=False)
class _Kept:
    """The request of a key."""

    fingerprint: bytes
    runs: list[SequenceRun]
    created_s: int
    reading: Reading | None = None
    left_s: float = 0.0  # when the current state began

    @property
    def num_delivered(self) -> int:
        """Output tokens that a client has brought, and that were not generated here."""
        return max(len(run.job.delivered) for run in self.runs)

    @property
    def final_error(self) -> ApiError | None:
        """The error of a run that ended with an internal error; None if no run did."""
        return next((final_error for run in self.runs if (final_error := run.final_error) is not None), None)

    @property
    def may_run_again(self) -> bool:
        """The request failed, and another run may succeed."""
        return any(run.failed for run in self.runs) and self.final_error is None


_OwnedKey = tuple[str, str, str]  # owner, tenant and key


def _owner(owned_key: _OwnedKey) -> str:
    return owned_key[0]


class OwnerShares(Generic[K, V]):
    """Entries in the order in which they came. `owner_of`: the owner of a key. `num_bytes`: of all entries.

    At a limit, the oldest entry of the owner that keeps the most is dropped. So no owner can push out entries of an
    owner that keeps no more than an equal share of the limit (max-min fairness).
    """

    def __init__(self, owner_of: Callable[[K], str]) -> None:
        self._owner_of = owner_of
        self._entries: dict[K, V] = {}
        self._sizes: dict[str, dict[K, int]] = {}  # of each owner's entries, in their order
        self._num_bytes_of: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[K, V]]:
        """The entries, the oldest first."""
        return iter(self._entries.items())

    def add(self, key: K, value: V, num_bytes: int = 0) -> None:
        """Add an entry with a new key."""
        owner = self._owner_of(key)
        self._entries[key] = value
        self._sizes.setdefault(owner, {})[key] = num_bytes
        self._num_bytes_of[owner] = self._num_bytes_of.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes

    def remove(self, key: K) -> None:
        """Remove an entry. No effect if no entry has this key."""
        if self._entries.pop(key, None) is None:
            return
        owner = self._owner_of(key)
        num_bytes = self._sizes[owner].pop(key)
        self._num_bytes_of[owner] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._sizes[owner]:
            del self._sizes[owner], self._num_bytes_of[owner]

    def first_of_most(self) -> K:
        """The oldest entry of the owner with the most entries. There must be an entry."""
        owner = max(self._sizes, key=lambda owner: len(self._sizes[owner]))
        return next(iter(self._sizes[owner]))

    def first_of_largest(self) -> K:
        """The oldest entry of the owner with the most bytes. There must be an entry."""
        return next(iter(self._sizes[max(self._num_bytes_of, key=self._num_bytes_of.__getitem__)]))


class RequestStore:
    """Requests with keys. `clock` gives seconds. Call `tick` a few times a second.

    `grace_s`: how long a request without a client runs before it is cancelled. Above MAX_WAITING such requests, the
    oldest of the owner with the most is cancelled. `keep_s`: how long a finished answer is kept. Above `max_bytes`
    (estimated), the owner with the most bytes loses its oldest answer. Above MAX_FINISHED answers, the owner with the
    most answers does.
    """

    def __init__(
        self,
        *,
        grace_s: float = 10.0,
        keep_s: float = 60.0,
        max_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grace_s = grace_s
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: dict[_OwnedKey, _Kept] = {}
        # Subsets of _kept, oldest first:
        self._waiting: OwnerShares[_OwnedKey, _Kept] = OwnerShares(_owner)
        self._finished: OwnerShares[_OwnedKey, _Kept] = OwnerShares(_owner)
        # How often a connection got a request that already ran or had finished.
        self.num_taken_up = 0

    @property
    def num_waiting(self) -> int:
        """Running requests without a client."""
        return len(self._waiting)

    @property
    def num_finished(self) -> int:
        """Finished answers that are kept."""
        return len(self._finished)

    def has(self, key: RequestKey) -> bool:
        """Whether the key belongs to a request, of any content."""
        return (key.owner, key.tenant, key.key) in self._kept

    def open(self, key: RequestKey, submit: Callable[[], list[SequenceRun]], *, num_delivered: int = 0) -> Reading:
        """Read the request of this key from its beginning. A new key submits the request.

        `num_delivered`: output tokens that the client brings. Another client may have started the kept request with
        more such tokens. These tokens come from that client and not from this server, and have no log probabilities. So
        the kept request cannot answer this client, and the request is submitted again.

        Raises ApiError 422 if the key belongs to another request, and what `submit` raises.
        """
        owned_key = (key.owner, key.tenant, key.key)
        kept = self._kept.get(owned_key)
        if kept is not None and kept.may_run_again:
            self._drop(owned_key)
            kept = None
        elif kept is not None and kept.fingerprint == key.fingerprint and kept.num_delivered > num_delivered:
            self._interrupt(kept)
            self._drop(owned_key)
            kept = None
        if kept is None:
            kept = self._kept[owned_key] = _Kept(key.fingerprint, submit(), int(time.time()))
        elif kept.fingerprint != key.fingerprint:
            raise key.other_request()
        else:
            self._take_over(owned_key, kept)
        kept.reading = Reading(kept.runs, kept.created_s, lambda reading: self._leave(owned_key, kept, reading))
        if (final_error := kept.final_error) is not None:
            kept.reading.interrupt(final_error)  # also readers of the other samples, which were cancelled
        return kept.reading

    def tick(self) -> None:
        """Cancel and drop what is too old."""
        now_s = self._clock()
        for owned_key, kept in list(self._waiting):
            self._check(owned_key, kept, now_s)
        while self._finished:
            owned_key, oldest = next(iter(self._finished))
            if now_s - oldest.left_s < self._keep_s:
                break
            self._drop(owned_key)

    def drain(self) -> None:
        """No client can come back, so no request waits for a client from now on."""
        self._grace_s = 0.0
        self.tick()

    def _take_over(self, owned_key: _OwnedKey, kept: _Kept) -> None:
        self.num_taken_up += 1
        self._interrupt(kept)
        self._waiting.remove(owned_key)
        self._finished.remove(owned_key)

    @staticmethod
    def _interrupt(kept: _Kept) -> None:
        if kept.reading is not None:
            message = "another connection has asked for the answer to this idempotency key, and has it now"
            kept.reading.interrupt(ApiError(409, message, code="replaced"))

    def _leave(self, owned_key: _OwnedKey, kept: _Kept, reading: Reading) -> None:
        if kept.reading is not reading or self._kept.get(owned_key) is not kept:
            return  # another connection reads it, or the request failed and was dropped
        kept.reading, kept.left_s = None, self._clock()
        self._waiting.add(owned_key, kept)
        self._check(owned_key, kept, kept.left_s)
        if len(self._waiting) > MAX_WAITING:
            self._drop(self._waiting.first_of_most())

    def _check(self, owned_key: _OwnedKey, kept: _Kept, now_s: float) -> None:
        """Decide about a request that no connection reads."""
        if kept.may_run_again:
            self._drop(owned_key)
        elif kept.final_error is not None or all(run.ended for run in kept.runs):
            self._waiting.remove(owned_key)
            self._finish(owned_key, kept, now_s)
        elif now_s - kept.left_s >= self._grace_s:
            self._drop(owned_key)

    def _finish(self, owned_key: _OwnedKey, kept: _Kept, now_s: float) -> None:
        for run in kept.runs:
            run.close()
        kept.left_s = now_s
        self._finished.add(owned_key, kept, sum(run.num_bytes for run in kept.runs))
        while self._finished.num_bytes > self._max_bytes:
            self._drop(self._finished.first_of_largest())
        if len(self._finished) > MAX_FINISHED:
            self._drop(self._finished.first_of_most())

    def _drop(self, owned_key: _OwnedKey) -> None:
        kept = self._kept.pop(owned_key)
        self._waiting.remove(owned_key)
        self._finished.remove(owned_key)
        for run in kept.runs:
            run.close()
