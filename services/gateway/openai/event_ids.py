"""The ids of a stream's events: how far the client has come, so that any gateway can go on behind it.

    68e7a1b2.9f3a2b1c.12,,7e        when the answer began (Unix time, hexadecimal)
             └ checksum of all tokens that were shown
                      └ choice by choice: 12 tokens shown, nothing yet, ended after 7 tokens
    68e7a1b2.9f3a2b1c.40e,31e,7e.u  the usage was sent, too (`d`: and [DONE])

An event's id covers this event and all before it. The checksum catches an answer that is not the same when it is
generated again: a client gets an error then, and never two halves of different answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.gateway.errors import ApiError, invalid

LAST_EVENT_ID = "Last-Event-ID"
# An id names every choice. Streams of more have no ids.
MAX_CHOICES = 64
_FIRST_SUM, _FNV_PRIME = 0x811C9DC5, 0x01000193
_PATTERN = re.compile(r"([0-9a-f]{1,8})\.([0-9a-f]{8})\.((?:[0-9]{1,10}e?)?(?:,(?:[0-9]{1,10}e?)?)*)(?:\.([ud]))?")


class ChoicePosition(NamedTuple):
    """Where a client is in a choice. `tokens` None: nothing of it was sent, not even whose message it is."""

    tokens: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class EventId:
    """An id, taken apart. `after` is what followed the choices: nothing, the usage, or [DONE]."""

    created_s: int
    checksum: int
    places: tuple[ChoicePosition, ...]
    after: Literal["", "u", "d"] = ""


def parse_event_id(text: str, max_tokens: Sequence[int], *, has_usage: bool) -> EventId:
    """An id that a client has sent to a stream whose choices have at most so many tokens.

    Raises ApiError 400 if no event of such a stream can have it.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise cannot_resume(f"{text[:80]!r} is no id of an event")
    places = tuple(map(_place, match[3].split(",")))
    if len(places) != len(max_tokens):
        raise cannot_resume(f"it is of a stream of {len(places)} choices, and this one has {len(max_tokens)}")
    for place, limit in zip(places, max_tokens, strict=True):
        if place.tokens is not None and place.tokens > limit:
            raise cannot_resume(f"{place.tokens} tokens are more than this request's {limit}")
    after: Literal["", "u", "d"] = "u" if match[4] == "u" else "d" if match[4] == "d" else ""
    if after and not all(place.ended for place in places):
        raise cannot_resume("it is of the stream's end, but not all choices have ended")
    if after == "u" and not has_usage:
        raise cannot_resume("it is of the usage, which this request does not ask for")
    return EventId(int(match[1], 16), int(match[2], 16), places, after)


def cannot_resume(why: str) -> ApiError:
    """The answer to an id behind which nothing can follow."""
    return invalid(LAST_EVENT_ID, f"{LAST_EVENT_ID}: {why}", code="cannot_resume")


class StreamProgress:
    """How far a stream has come. `read` takes tokens in; `line` gives the id of an event that shows them.

    Lines are empty if there are more than MAX_CHOICES choices. The checksum of a choice's tokens is FNV-1 (Fowler, Noll
    and Vo) with 32 bits, a token at a time; that of the stream is the sum of what its choices have shown, each by a
    weight of its own, so that choices which go wrong in the same way do not cancel each other.
    """

    __slots__ = ("_counts", "_has_ids", "_head", "_is_single", "_places", "_shown_sums", "_sums", "checksum")

    def __init__(self, created_s: int, num_choices: int) -> None:
        self._has_ids = num_choices <= MAX_CHOICES
        self._is_single = num_choices == 1
        self._head = b"id: %x." % created_s
        self._counts = [0] * num_choices
        self._places = [b""] * num_choices
        self._sums = [_FIRST_SUM] * num_choices
        self._shown_sums = [0] * num_choices
        self.checksum = 0  # of what was shown

    def read(self, index: int, token_ids: Sequence[int]) -> None:
        """A choice's next tokens; their text is part of the next event that shows some."""
        self._counts[index] += len(token_ids)
        checksum = self._sums[index]
        for token_id in token_ids:
            checksum = (checksum * _FNV_PRIME ^ token_id) & 0xFFFFFFFF
        self._sums[index] = checksum

    def first_line(self, index: int) -> bytes:
        """The `id:` line of an event that precedes a choice's tokens."""
        return self._show(index, b"0", _FIRST_SUM)

    def line(self, index: int, *, ended: bool = False) -> bytes:
        """The `id:` line of an event that shows all that was read of a choice."""
        if self._is_single and not ended:  # nearly every event of most streams
            self.checksum = self._shown_sums[0] = self._sums[0]
            return b"%b%08x.%d\n" % (self._head, self.checksum, self._counts[0])
        place = b"%de" % self._counts[index] if ended else b"%d" % self._counts[index]
        return self._show(index, place, self._sums[index])

    def end_line(self, after: Literal["u", "d"]) -> bytes:
        """The `id:` line of what follows the choices: the usage (u) or the terminator (d)."""
        if not self._has_ids:
            return b""
        return b"%b%08x.%b.%b\n" % (self._head, self.checksum, b",".join(self._places), after.encode())

    def _show(self, index: int, place: bytes, checksum: int) -> bytes:
        if not self._has_ids:
            return b""
        self._places[index] = place
        change = (checksum - self._shown_sums[index]) * (2 * index + 1)
        self.checksum = (self.checksum + change) & 0xFFFFFFFF
        self._shown_sums[index] = checksum
        return b"%b%08x.%b\n" % (self._head, self.checksum, b",".join(self._places))


def _place(text: str) -> ChoicePosition:
    if not text:
        return ChoicePosition()
    return ChoicePosition(int(text.removesuffix("e")), text.endswith("e"))
