"""Reads single keys from a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from collections.abc import Iterator

# What terminals send for a key, after the escape character.
_SEQUENCES = {"[A": "up", "OA": "up", "[B": "down", "OB": "down", "[Z": "back-tab"}
_ESCAPE = "\x1b"
_NAMES = {"\t": "tab", "k": "up", "j": "down"}
_MAX_BYTES = 64


@contextlib.contextmanager
def single_keys(descriptor: int) -> Iterator[None]:
    """The terminal gives each key at once and shows none, while the block runs. Ctrl-C still interrupts."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_keys(descriptor: int, timeout_s: float) -> list[str]:
    """The keys pressed within the time. An end of the input is the key "q"."""
    ready, _, _ = select.select([descriptor], [], [], timeout_s)
    if not ready:
        return []
    data = os.read(descriptor, _MAX_BYTES)
    return parse_keys(data.decode(errors="replace")) if data else ["q"]


def parse_keys(text: str) -> list[str]:
    """Names of keys. A character is its own name, but k is "up", j is "down" and a tab is "tab". Unknown sequences of a
    terminal give no key."""
    keys = []
    while text:
        if text.startswith(_ESCAPE):
            end = 1 + (text[1:2] in ("[", "O"))
            while end > 1 and end < len(text) and not text[end].isalpha() and text[end] != "~":
                end += 1
            sequence, text = text[1 : end + 1], text[end + 1 :]
            if sequence in _SEQUENCES:
                keys.append(_SEQUENCES[sequence])
        else:
            keys.append(_NAMES.get(text[0], text[0]))
            text = text[1:]
    return keys
