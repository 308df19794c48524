"""The form that a text is to have, as clients state it. trial.py makes a grammar of it for the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from services.gateway.errors import invalid
from services.gateway.grammars.trial import MAX_GRAMMAR_CHARS, Kind

MAX_CHOICES = 4096


class Structure(NamedTuple):
    """`text` is a JSON Schema, a regular expression, a list of strings in JSON, or a grammar in Lark or GBNF; `field`
    is what the client calls it."""

    field: str
    kind: Kind
    text: str
    any_whitespace: bool = True  # else there is none between the parts of a JSON value


def from_schema(field: str, schema: Any, any_whitespace: bool = True) -> Structure:
    """Of a decoded JSON Schema, or of its text. Raises ApiError 400."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise invalid(field, f"{field} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} must be a JSON Schema, which is an object")
    try:
        return Structure(field, "json_schema", orjson.dumps(schema).decode(), any_whitespace)
    except orjson.JSONEncodeError as error:
        raise invalid(field, f"{field} cannot be written as JSON: {error}") from None


def from_choices(field: str, choices: Sequence[str]) -> Structure:
    """Raises ApiError 400."""
    if not choices or not all(choices):
        raise invalid(field, f"{field} must have at least one text in it, and no empty one")
    if len(choices) > MAX_CHOICES:
        raise invalid(field, f"{field} has {len(choices)} texts; at most {MAX_CHOICES} are possible")
    return Structure(field, "choice", orjson.dumps(list(choices)).decode())


def check_size(structure: Structure) -> None:
    """Raises ApiError 400 if the text is too long to be read at all."""
    if (count := len(structure.text)) > MAX_GRAMMAR_CHARS:
        field = structure.field
        raise invalid(field, f"{field} has {count} characters; at most {MAX_GRAMMAR_CHARS} are possible")
