"""The result of one check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CheckStatus(enum.StrEnum):
    """From the best to the worst."""

    OK = "ok"
    NOTE = "note"  # works, but may surprise
    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Check:
    """`found`: the value. `advice`: why it is not ok, and what to do; empty if it is ok."""

    name: str
    status: CheckStatus
    found: str
    advice: str = ""
