"""Decides how many new requests enter a gateway."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from services.runtime.retry_after import RetryAfter

# A request keeps its queue position for 1 s while its body arrives. After that it competes again. Otherwise clients
# that send only a head could take all positions.
_KEPT_S = 1.0


class AdmissionControl:
    """Admits as many new requests as the scheduler's queue has free positions. It reads no clock.

    Each report of the scheduler has two numbers: the free positions, and how many submissions of this stream it had
    counted then. Until the first report every request is admitted. Each later submission takes one of the free
    positions. Only online requests count: offline ones have a queue of their own.

    Other gateways take positions too, and requests leave the queue. The last report is valid while the scheduler sends
    messages. If no message came between two ticks, the report is stale. Then each tick assumes the largest number of
    free positions that was reported on this stream, until the next message.

    A request takes a position from `enter` on: many requests may enter before the first of them is submitted.
    """

    def __init__(self) -> None:
        self.retry_after = RetryAfter()
        self._numbers = count()
        self._entering: OrderedDict[int, float] = OrderedDict()  # time of entry, oldest first
        self.new_stream()

    # -- requests ----------------------------------------------------------------------------------

    def enter(self, now_s: float, num_unsent: int) -> int | None:
        """Admit a request behind `num_unsent` requests that are not sent yet. Returns a number for `leave`; None: the
        queue has no position left."""
        entering = self._entering
        while entering and now_s - entering[oldest := next(iter(entering))] > _KEPT_S:
            del entering[oldest]
        if not self.takes(num_unsent + len(entering)):
            return None
        number = next(self._numbers)
        entering[number] = now_s
        return number

    def leave(self, number: int) -> None:
        """The request is submitted, or has failed."""
        self._entering.pop(number, None)

    def takes(self, num_waiting: int) -> bool:
        """Whether the queue accepts one more request behind `num_waiting` requests that are not sent yet."""
        return self._free is None or self._free - (self._sent - self._seen) > num_waiting

    # -- the stream to the scheduler ---------------------------------------------------------------

    def new_stream(self) -> None:
        """Forget the last stream's reports."""
        self._sent = self._seen = 0  # submissions
        self._free: int | None = None  # None: no report has come on this stream
        self._last_report = 0, 0
        self._most_free = 0
        self._is_fresh = False

    def sent(self, num_submissions: int) -> None:
        """This many more online requests were submitted."""
        self._sent += num_submissions

    def update(self, num_free: int, num_submissions: int) -> None:
        """The queue had `num_free` free positions after `num_submissions` of this stream."""
        self._free, self._seen = self._last_report = num_free, num_submissions
        self._most_free = max(self._most_free, num_free)
        self._is_fresh = True

    def unchanged(self) -> None:
        """A message of the scheduler had no report, so the last report still holds."""
        if self._free is not None:
            self._free, self._seen = self._last_report
            self._is_fresh = True

    def tick(self, now_s: float) -> None:
        """Call this a few times a second."""
        self.retry_after.measure(now_s)
        if self._free is not None and not self._is_fresh:
            self._free, self._seen = self._most_free, self._sent
        self._is_fresh = False
