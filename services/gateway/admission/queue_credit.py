"""Estimates how many more requests the scheduler's queue accepts."""

from __future__ import annotations


class QueueCredit:
    """The free positions in the scheduler's queue, as one stream to the scheduler knows them. It reads no clock.

    The scheduler reports how many positions were free after how many submissions of this stream. Each later submission
    takes one of these positions. Other gateways take positions too, and requests leave the queue. So a report that was
    not renewed for a while says nothing. Then only one limit is certain: no more requests go out at once than the
    largest number ever reported.
    """

    def __init__(self) -> None:
        self._sent = self._seen = 0  # submissions
        self._free: int | None = None  # None: the scheduler reports nothing
        self._last_report = 0, 0
        self._most_free = 0
        self._is_fresh = False

    def sent(self, num_submissions: int) -> None:
        """This many more submissions were sent."""
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

    def tick(self) -> None:
        """Call this a few times a second."""
        if self._free is not None and not self._is_fresh:
            self._free, self._seen = self._most_free, self._sent
        self._is_fresh = False

    def takes(self, num_waiting: int) -> bool:
        """Whether the queue accepts one more request behind `num_waiting` requests that are not sent yet."""
        return self._free is None or self._free - (self._sent - self._seen) > num_waiting
