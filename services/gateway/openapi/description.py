"""What a route takes and answers, beside its path and its docstring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from services.gateway.openapi.answers import Error

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "openapi_description"
EVENT_STREAM = "text/event-stream"  # the value of `text` for streams with events of many shapes


@dataclass(frozen=True, slots=True)
class Described:
    """What /openapi.json says of one route. `body`: the model that parses the request. `form`: the model of a
    multipart body. `query`: parameters, each with its meaning. `answer`: the JSON of status 200, and of `statuses`
    from 300 on. `event`: the JSON of one event of a stream. `text`: the media type of an answer without a schema; with
    application/json the answer is any object. `statuses`: further statuses without the error shape, each with its
    meaning. `errors`: statuses with the shape `error`. `headers`: of the request, each with its meaning.
    """

    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    text: str = ""
    statuses: dict[int, str] = field(default_factory=dict)
    errors: Sequence[int] = ()
    headers: dict[str, str] = field(default_factory=dict)
    error: type[BaseModel] = Error
    form: type[BaseModel] | None = None
    query: dict[str, str] = field(default_factory=dict)


def described(
    *,
    body: type[BaseModel] | None = None,
    answer: type[BaseModel] | None = None,
    event: type[BaseModel] | None = None,
    text: str = "",
    statuses: dict[int, str] | None = None,
    errors: Sequence[int] = (),
    headers: dict[str, str] | None = None,
    error: type[BaseModel] = Error,
    form: type[BaseModel] | None = None,
    query: dict[str, str] | None = None,
) -> Callable[[F], F]:
    """Adds the description to an endpoint. See Described."""

    def add(endpoint: F) -> F:
        one = Described(body, answer, event, text, statuses or {}, errors, headers or {}, error, form, query or {})
        setattr(endpoint, _ATTRIBUTE, one)
        return endpoint

    return add


def description_of(endpoint: Any) -> Described | None:
    """The description of an endpoint; None if it has none."""
    found: Described | None = getattr(endpoint, _ATTRIBUTE, None)
    return found
