"""Who reads which runs. Requests without a key end with their connection; those with a key wait for their client.

         submit                    connection lost                  all ended
    ──────────────▶  being read  ──────────────────▶  waiting  ─────────────────▶  finished
                         ▲                             │   │                         │   │
                         └───────── the same key ──────┼───┼─────────────────────────┘   │
                                                       ▼   └── grace is over: cancelled   └── too old, or too many
                                                     failed: forgotten, so that a retry runs again

What failed with an INTERNAL error has finished, too: a request that kills its workers is not run again for a retry.
A key whose answer is still being read changes hands: clients come back before a server notices that they were gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.engine.generation import Generation
from services.gateway.engine.idempotency import RequestKey
from services.gateway.engine.sequence_run import SequenceRun
from services.gateway.errors import ApiError

MAX_FINISHED = 4096
# A storm of clients that start and go away must not fill the server with what nobody reads.
MAX_WAITING = 256


class Reading:
    """All sequences of a request as one connection reads them. Always call `close()` in the end."""

    __slots__ = ("_release", "created_s", "generations")

    def __init__(self, runs: Sequence[SequenceRun], created_s: int, release: Callable[[Reading], None]) -> None:
        self.generations = [Generation(run) for run in runs]
        self.created_s = created_s  # Unix time
        self._release = release

    def interrupt(self, error: Exception) -> None:
        """Whoever reads gets the error."""
        for generation in self.generations:
            generation.interrupt(error)

    def close(self) -> None:
        """Nobody reads any more. Safe to call again."""
        for generation in self.generations:
            generation.close()
        self._release(self)


def read_once(runs: Sequence[SequenceRun]) -> Reading:
    """The reading of a request without a key: what has not ended with it is cancelled."""

    def release(_: Reading) -> None:
        for run in runs:
            run.close()

    return Reading(runs, int(time.time()), release)


@dataclass(slots=True, eq=False)
class _Kept:
    """What a key stands for."""

    fingerprint: bytes
    runs: list[SequenceRun]
    created_s: int
    reading: Reading | None = None
    left_s: float = 0.0  # when it came into the state in which it is
    num_bytes: int = 0  # once it has finished

    @property
    def num_delivered(self) -> int:
        """Tokens that were not generated here, but brought by whoever submitted it."""
        return max(len(run.job.delivered) for run in self.runs)

    @property
    def final_error(self) -> ApiError | None:
        """With which one of them failed, and all would again."""
        return next((final_error for run in self.runs if (final_error := run.final_error) is not None), None)

    @property
    def may_run_again(self) -> bool:
        """It failed, and another run may bring an answer."""
        return any(run.failed for run in self.runs) and self.final_error is None


_Place = tuple[str, str]  # tenant and key


class RequestStore:
    """Requests with keys. `clock` gives seconds; call `tick` a few times a second.

    `grace_s`: how long a request waits for its client before it is cancelled; of more than MAX_WAITING the oldest is
    cancelled. `keep_s`: how long what has finished is kept, up to `max_bytes` (an estimate) and MAX_FINISHED of them.
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
        self._kept: dict[_Place, _Kept] = {}
        # Of these, oldest first:
        self._waiting: dict[_Place, _Kept] = {}
        self._finished: dict[_Place, _Kept] = {}
        self._num_bytes = 0
        # Times that a connection was given what ran or had run already.
        self.num_taken_up = 0

    @property
    def num_waiting(self) -> int:
        """Requests that run and have no client."""
        return len(self._waiting)

    @property
    def num_finished(self) -> int:
        """Answers that are kept."""
        return len(self._finished)

    def has(self, key: RequestKey) -> bool:
        """Whether the key stands for a request, of whatever content."""
        return (key.tenant, key.key) in self._kept

    def open(self, key: RequestKey, submit: Callable[[], list[SequenceRun]], *, num_delivered: int = 0) -> Reading:
        """Read the request of this key, from its beginning; if there is none, it is submitted.

        `num_delivered`: tokens that the client brings. A run that went on behind more of them is no answer for it:
        those are as another client said, and without their log probabilities. It is submitted anew.

        Raises ApiError 422 if the key stands for another request, and what `submit` raises.
        """
        place = (key.tenant, key.key)
        kept = self._kept.get(place)
        if kept is not None and kept.may_run_again:
            self._drop(place)
            kept = None
        elif kept is not None and kept.fingerprint == key.fingerprint and kept.num_delivered > num_delivered:
            self._interrupt(kept)
            self._drop(place)
            kept = None
        if kept is None:
            kept = self._kept[place] = _Kept(key.fingerprint, submit(), int(time.time()))
        elif kept.fingerprint != key.fingerprint:
            raise key.other_request()
        else:
            self._take_over(place, kept)
        kept.reading = Reading(kept.runs, kept.created_s, lambda reading: self._leave(place, kept, reading))
        if (final_error := kept.final_error) is not None:
            kept.reading.interrupt(final_error)  # also whoever reads another sample, which was cancelled for it
        return kept.reading

    def tick(self) -> None:
        """Time has passed."""
        now_s = self._clock()
        for place, kept in list(self._waiting.items()):
            self._check(place, kept, now_s)
        while self._finished:
            place, oldest = next(iter(self._finished.items()))
            if now_s - oldest.left_s < self._keep_s:
                break
            self._drop(place)

    def drain(self) -> None:
        """No client can come back any more: nothing waits for one from now on."""
        self._grace_s = 0.0
        self.tick()

    def _take_over(self, place: _Place, kept: _Kept) -> None:
        self.num_taken_up += 1
        self._interrupt(kept)
        self._waiting.pop(place, None)
        if self._finished.pop(place, None) is not None:
            self._num_bytes -= kept.num_bytes

    @staticmethod
    def _interrupt(kept: _Kept) -> None:
        if kept.reading is not None:
            message = "another connection has asked for the answer to this idempotency key, and has it now"
            kept.reading.interrupt(ApiError(409, message, code="replaced"))

    def _leave(self, place: _Place, kept: _Kept, reading: Reading) -> None:
        if kept.reading is not reading or self._kept.get(place) is not kept:
            return  # another connection has it, or it had failed and was forgotten
        kept.reading, kept.left_s = None, self._clock()
        self._waiting[place] = kept
        self._check(place, kept, kept.left_s)
        if len(self._waiting) > MAX_WAITING:
            self._drop(next(iter(self._waiting)))

    def _check(self, place: _Place, kept: _Kept, now_s: float) -> None:
        """What becomes of a request that nobody reads."""
        if kept.may_run_again:
            self._drop(place)
        elif kept.final_error is not None or all(run.ended for run in kept.runs):
            del self._waiting[place]
            self._finish(place, kept, now_s)
        elif now_s - kept.left_s >= self._grace_s:
            self._drop(place)

    def _finish(self, place: _Place, kept: _Kept, now_s: float) -> None:
        for run in kept.runs:
            run.close()
        kept.left_s = now_s
        kept.num_bytes = sum(run.num_bytes for run in kept.runs)
        self._finished[place] = kept
        self._num_bytes += kept.num_bytes
        while self._num_bytes > self._max_bytes or len(self._finished) > MAX_FINISHED:
            self._drop(next(iter(self._finished)))

    def _drop(self, place: _Place) -> None:
        kept = self._kept.pop(place)
        self._waiting.pop(place, None)
        if self._finished.pop(place, None) is not None:
            self._num_bytes -= kept.num_bytes
        for run in kept.runs:
            run.close()
