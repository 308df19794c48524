"""How many more requests the scheduler's queue takes, by what it has told and what is on its way to it."""

from __future__ import annotations


class Room:
    """As one stream to the scheduler tells. No clock in here.

    The scheduler tells how many places there were after how many of our submissions; those behind them take of these
    places. Others may take them, too (other gateways), and requests may leave the queue: a number that is not told anew
    for a while is worth nothing, and then only so much is certain that no more go in at once than ever fit.
    """

    def __init__(self) -> None:
        self._sent = self._seen = 0
        self._places: int | None = None  # None: the scheduler tells nothing
        self._told = 0, 0  # last
        self._most = 0
        self._is_fresh = False

    def sent(self, num_submissions: int) -> None:
        """So many more are on their way."""
        self._sent += num_submissions

    def told(self, places: int, num_submissions: int) -> None:
        """There were so many places after so many submissions of this stream."""
        self._places, self._seen = self._told = places, num_submissions
        self._most = max(self._most, places)
        self._is_fresh = True

    def unchanged(self) -> None:
        """The scheduler has said something, and nothing of this, as it does when that is as it was."""
        if self._places is not None:
            self._places, self._seen = self._told
            self._is_fresh = True

    def tick(self) -> None:
        """To be called a few times a second."""
        if self._places is not None and not self._is_fresh:
            self._places, self._seen = self._most, self._sent
        self._is_fresh = False

    def takes(self, num_waiting: int) -> bool:
        """Whether there is a place for one more behind so many that are not sent yet."""
        return self._places is None or self._places - (self._sent - self._seen) > num_waiting
