"""The Python client: `PacelineClient` and `AsyncPacelineClient`."""

from services.client.client import AsyncPacelineClient, PacelineClient
from services.client.types import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PacelineError,
    Piece,
    Result,
    Unavailable,
    Usage,
)

__all__ = [
    "AsyncPacelineClient",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "PacelineClient",
    "PacelineError",
    "Piece",
    "Result",
    "Unavailable",
    "Usage",
]
