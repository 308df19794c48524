"""A response that this gateway generates, and the clients that read it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from services.gateway.errors import ApiError
from services.gateway.responses_api.pieces import Outcome, OutputPiece
from services.gateway.store.records import ResponseName, StoredResponse


class RunningResponse:
    """The pieces of a response so far. The response ends with an `outcome`, or with an error in `broken`. After such an
    error, a client can ask for the response again.

    `is_stored`: the store has its record. `late_record`: the record to store at the end, if no client can know the id
    earlier. `runs_alone`: the response runs without a client. Otherwise its generation stops `grace_s` after the last
    client has left. If it is stored, its status stays in_progress, and any gateway can continue it.
    """

    def __init__(
        self,
        name: ResponseName,
        head: Mapping[str, Any],
        *,
        is_stored: bool,
        runs_alone: bool = False,
        grace_s: float = 0.0,
        late_record: StoredResponse | None = None,
        fingerprint: bytes = b"",
    ) -> None:
        self.name = name
        self.head = head
        self.is_stored = is_stored
        self.runs_alone = runs_alone
        self.late_record = late_record
        self.fingerprint = fingerprint
        self.pieces: Sequence[OutputPiece] = ()  # that readers see
        self.all_pieces: Sequence[OutputPiece] = ()  # also those that came while readers see no new ones
        self.token_ids = array("i")
        self.num_saved = 0  # tokens that the store has
        self.is_resumed = False  # it was begun before, perhaps at another gateway
        self.outcome: Outcome | None = None
        self.broken: ApiError | None = None
        self.task: asyncio.Task[None] | None = None
        self._grace_s = grace_s
        self._num_readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        """No more pieces will come."""
        return self.outcome is not None or self.broken is not None

    def show(self, pieces: Sequence[OutputPiece], token_ids: array[int] | None = None) -> None:
        """Let readers see these pieces, which may grow."""
        self.pieces = self.all_pieces = pieces
        self.token_ids = self.token_ids if token_ids is None else token_ids

    def freeze(self) -> Sequence[OutputPiece]:
        """Show no new piece from now on. Returns the pieces that are shown."""
        self.pieces = tuple(self.pieces)
        return self.pieces

    def thaw(self) -> None:
        """Show all pieces again."""
        self.pieces = self.all_pieces
        self.tell()

    def tell(self) -> None:
        """Wake the readers: there is something new."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def change(self) -> None:
        """Wait for something new."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def end(self, outcome: Outcome) -> None:
        """The response has ended. Readers see all pieces or, if it was cancelled, only those that are shown now."""
        if outcome.status != "cancelled":
            self.pieces = self.all_pieces
        self.outcome = outcome
        self.tell()

    def break_off(self, error: ApiError) -> None:
        """This gateway does not bring the response to its end."""
        self.broken = error
        self.tell()

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """The context of a client that reads the response."""
        self._num_readers += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers and not self.runs_alone and not self.is_over:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._grace_s, self.abandon)

    def abandon(self) -> None:
        """Stop the generation. The response is then `broken`, or ends as the store says (for example, cancelled)."""
        self._stop_timer()
        if self.task is not None:
            self.task.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def ended(
    name: ResponseName, head: Mapping[str, Any], pieces: Sequence[OutputPiece], outcome: Outcome
) -> RunningResponse:
    """An ended response from the store, in the form that the readers of running responses take."""
    response = RunningResponse(name, head, is_stored=True)
    response.show(pieces)
    response.outcome = outcome
    return response
