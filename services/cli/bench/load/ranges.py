"""Values of flags: numbers of tokens, durations, and ranges of both."""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple, TypeVar

MAX_TOKENS = 10_000_000
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")


class TokenRange(NamedTuple):
    """A number of tokens between two bounds, both included."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


class SecondsRange(NamedTuple):
    """A duration between two bounds, in seconds."""

    low: float
    high: float

    def draw(self, random: Random) -> float:
        return random.uniform(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g}s" if self.low == self.high else f"{self.low:g}s-{self.high:g}s"


R = TypeVar("R", TokenRange, SecondsRange)


def parse_tokens(text: str) -> TokenRange:
    """`128` or `64-512`. Raises ValueError."""
    low, _, high = text.partition("-")
    if not (low.isascii() and low.isdecimal() and (high or low).isdecimal() and (high or low).isascii()):
        raise ValueError(f"expected a number of tokens, like 128 or 64-512 (got {text!r})")
    return _ordered(TokenRange(int(low), int(high or low)), text, 1, MAX_TOKENS, "tokens")


def parse_count(text: str) -> TokenRange:
    """`4`, `2-8` or `0`. Raises ValueError."""
    if text == "0":
        return TokenRange(0, 0)
    return parse_tokens(text)


def parse_seconds(text: str) -> float:
    """`200ms`, `2s`, `1.5m`, or plain seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a duration, like 200ms or 2s (got {text!r})")
    return float(match[1]) * _UNITS[match[2] or "s"]


def parse_seconds_range(text: str) -> SecondsRange:
    """`2s` or `1s-5s`. Raises ValueError."""
    low, _, high = text.partition("-")
    return _ordered(SecondsRange(parse_seconds(low), parse_seconds(high or low)), text, 0, 86400, "seconds")


def _ordered(value: R, text: str, least: int, most: int, unit: str) -> R:
    if not least <= value.low <= value.high <= most:
        raise ValueError(f"expected {least} to {most} {unit}, the smaller bound first (got {text!r})")
    return value
