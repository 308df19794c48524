"""What an operation answers when it cannot be done, and what ends a whole link."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The values of google.rpc.Code that an operation can answer (the core imports no gRPC)."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10


class OpError(Exception):
    """One operation is refused. It has changed nothing."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class LinkError(Exception):
    """The stream of exchanges is broken: nothing that follows on this link can be trusted."""


class InvariantError(AssertionError):
    """The core's state contradicts itself: a bug of the core."""
