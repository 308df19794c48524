"""Splits a stream of server-sent events into lines."""

from __future__ import annotations


class EventLines:
    """Gets a stream's bytes in chunks. Lines end at line feeds; a last line without one is not given. (httpx' own lines
    would also end at U+2028 and the like, which may be part of a text.)"""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # a large event comes in many chunks

    def add(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk."""
        if b"\n" not in chunk:
            self._rest.append(chunk)
            return []
        *lines, last = b"".join((*self._rest, chunk)).split(b"\n")
        self._rest = [last]
        return lines
