"""The Python client: `PacelineClient` and `AsyncPacelineClient`."""

from services.client.client import AsyncPacelineClient, PacelineClient
from services.client.types import (
    Beam,
    Hypothesis,
    InvalidRequest,
    NotFound,
    Overloaded,
    PacelineError,
    Piece,
    Result,
    Retention,
    TokenLogprob,
    Unavailable,
    Usage,
)

__all__ = [
    "AsyncPacelineClient",
    "Beam",
    "Hypothesis",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "PacelineClient",
    "PacelineError",
    "Piece",
    "Result",
    "Retention",
    "TokenLogprob",
    "Unavailable",
    "Usage",
]
