"""The refusal of a request or of a registration, with the reason for its sender."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1.inference_pb2 import QueueLimit

# google.rpc.Code as numbers, because the core does not import grpc.
CODE_INVALID_ARGUMENT = 3
CODE_DEADLINE_EXCEEDED = 4
CODE_RESOURCE_EXHAUSTED = 8
CODE_FAILED_PRECONDITION = 9
CODE_INTERNAL = 13
CODE_UNAVAILABLE = 14


@dataclass(eq=False)
class Rejection(Exception):
    """A refusal. `code`: google.rpc.Code. `field`: the field at fault, "" if none is."""

    code: int
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    queue_limit: QueueLimit.ValueType = QueueLimit.QUEUE_LIMIT_UNSPECIFIED


def invalid(field: str, message: str) -> Rejection:
    return Rejection(CODE_INVALID_ARGUMENT, f"{field}: {message}", field)


def failed_precondition(field: str, message: str) -> Rejection:
    return Rejection(CODE_FAILED_PRECONDITION, f"{field}: {message}", field)
