"""Event ids of a stream: they say how far the client has read, so that any gateway can resume the stream there.

    68e7a1b2.9f3a2b1c.12,,7e        when the answer began (Unix time, hexadecimal)
             └ checksum of all tokens that were sent
                      └ per choice: 12 tokens sent, nothing yet, ended after 7 tokens
    68e7a1b2.9f3a2b1c.40e,31e,7e.u  the usage was sent, too (`d`: and [DONE])

A stream has ids only if its request asks for them: many clients (vLLM's and SGLang's benchmarks, llmperf) read lines of
`data:` alone, and fail at any other. An event's id covers this event and all events before it. The checksum detects
that a repeated generation gave another answer. Then the client gets an error, and never two halves of different
answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.gateway.errors import ApiError, invalid

LAST_EVENT_ID = "Last-Event-ID"
# An id lists every choice. Streams with more choices have no ids.
MAX_CHOICES = 64
_FIRST_SUM, _FNV_PRIME = 0x811C9DC5, 0x01000193
_PATTERN = re.compile(r"([0-9a-f]{1,8})\.([0-9a-f]{8})\.((?:[0-9]{1,10}e?)?(?:,(?:[0-9]{1,10}e?)?)*)(?:\.([ud]))?")


class ChoicePosition(NamedTuple):
    """How far a client has read a choice. `tokens` None: nothing of the choice was sent, not even its role."""

    tokens: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class EventId:
    """A parsed id. `after`: what was sent after the choices: nothing (""), the usage (u), or [DONE] (d)."""

    created_s: int
    checksum: int
    positions: tuple[ChoicePosition, ...]
    after: Literal["", "u", "d"] = ""


def parse_event_id(text: str, max_tokens: Sequence[int], *, has_usage: bool) -> EventId:
    """Parse an id that a client has sent. `max_tokens`: the token limit of each choice of the stream.

    Raises ApiError 400 if no event of such a stream can have this id.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise cannot_resume(f"{text[:80]!r} is no id of an event")
    positions = tuple(map(_position, match[3].split(",")))
    if len(positions) != len(max_tokens):
        raise cannot_resume(f"it is of a stream of {len(positions)} choices, and this one has {len(max_tokens)}")
    for position, limit in zip(positions, max_tokens, strict=True):
        if position.tokens is not None and position.tokens > limit:
            raise cannot_resume(f"{position.tokens} tokens are more than this request's {limit}")
    after: Literal["", "u", "d"] = "u" if match[4] == "u" else "d" if match[4] == "d" else ""
    if after and not all(position.ended for position in positions):
        raise cannot_resume("it is of the stream's end, but not all choices have ended")
    if after == "u" and not has_usage:
        raise cannot_resume("it is of the usage, which this request does not ask for")
    return EventId(int(match[1], 16), int(match[2], 16), positions, after)


def cannot_resume(why: str) -> ApiError:
    """The error for an id at which the stream cannot resume."""
    return invalid(LAST_EVENT_ID, f"{LAST_EVENT_ID}: {why}", code="cannot_resume")


class StreamProgress:
    """How far a stream has come. `read` takes tokens; `line` gives the id of an event that shows them.

    Above MAX_CHOICES choices, and if the request does not ask for ids, the lines are empty. The checksum of a choice is
    FNV-1 (Fowler, Noll and Vo) with 32 bits, one step per token. The checksum of the stream is the sum over its
    choices, each with its own weight, so that it changes if two choices swap their tokens.
    """

    __slots__ = ("_counts", "_has_ids", "_head", "_is_single", "_positions", "_shown_sums", "_sums", "checksum")

    def __init__(self, created_s: int, num_choices: int, *, wanted: bool = True) -> None:
        self._has_ids = wanted and num_choices <= MAX_CHOICES
        self._is_single = self._has_ids and num_choices == 1
        self._head = b"id: %x." % created_s
        self._counts = [0] * num_choices
        self._positions = [b""] * num_choices
        self._sums = [_FIRST_SUM] * num_choices
        self._shown_sums = [0] * num_choices
        self.checksum = 0  # of all tokens sent

    def read(self, index: int, token_ids: Sequence[int]) -> None:
        """Take the next tokens of a choice. The next event that shows text covers them."""
        if not self._has_ids:
            return
        self._counts[index] += len(token_ids)
        checksum = self._sums[index]
        for token_id in token_ids:
            checksum = (checksum * _FNV_PRIME ^ token_id) & 0xFFFFFFFF
        self._sums[index] = checksum

    def first_line(self, index: int) -> bytes:
        """The `id:` line of an event before the first token of a choice."""
        return self._show(index, b"0", _FIRST_SUM)

    def line(self, index: int, *, ended: bool = False) -> bytes:
        """The `id:` line of an event that covers every token read of a choice."""
        if self._is_single and not ended:  # nearly every event of most streams
            self.checksum = self._shown_sums[0] = self._sums[0]
            return b"%b%08x.%d\n" % (self._head, self.checksum, self._counts[0])
        position = b"%de" % self._counts[index] if ended else b"%d" % self._counts[index]
        return self._show(index, position, self._sums[index])

    def end_line(self, after: Literal["u", "d"]) -> bytes:
        """The `id:` line after all choices: of the usage (u) or of the terminator (d)."""
        if not self._has_ids:
            return b""
        return b"%b%08x.%b.%b\n" % (self._head, self.checksum, b",".join(self._positions), after.encode())

    def _show(self, index: int, position: bytes, checksum: int) -> bytes:
        if not self._has_ids:
            return b""
        self._positions[index] = position
        change = (checksum - self._shown_sums[index]) * (2 * index + 1)
        self.checksum = (self.checksum + change) & 0xFFFFFFFF
        self._shown_sums[index] = checksum
        return b"%b%08x.%b\n" % (self._head, self.checksum, b",".join(self._positions))


def _position(text: str) -> ChoicePosition:
    if not text:
        return ChoicePosition()
    return ChoicePosition(int(text.removesuffix("e")), text.endswith("e"))
