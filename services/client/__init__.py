"""The Python client: `PacelineClient` and `AsyncPacelineClient`."""

from services.client.client import AsyncPacelineClient, PacelineClient
from services.client.types import (
    BeamHypothesis,
    BeamParams,
    EmbedResult,
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
    "BeamHypothesis",
    "BeamParams",
    "EmbedResult",
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
