"""The errors of one operation, of a whole link, and of the core itself."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

MAX_NAMED_IN_ERROR = 8


class Code(IntEnum):
    """The values of google.rpc.Code that an operation can answer (the core imports no gRPC)."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10


class OpError(Exception):
    """One operation is refused and has changed no sequence, block or pin.

    If an ExtendOp is refused because a worker has too few blocks, its workers get no step in the same exchange.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class LinkError(Exception):
    """The sequence of exchanges is broken. Nothing that follows on this link can be trusted."""


class InvariantError(AssertionError):
    """The core's state contradicts itself. This is a bug of the core."""


def named_sequences(sequence_ids: Sequence[int]) -> str:
    """Names sequences in an error message: the first few, and how many more there are."""
    named = ", ".join(map(str, sequence_ids[:MAX_NAMED_IN_ERROR]))
    more = len(sequence_ids) - MAX_NAMED_IN_ERROR
    return f"sequences {named}" + (f" and {more} more" if more > 0 else "")
