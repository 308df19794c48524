"""The form of an output as a client gives it. trial.py makes a grammar from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from services.gateway.errors import invalid
from services.gateway.grammars.trial import MAX_GRAMMAR_CHARS, Kind

MAX_CHOICES = 4096


class Structure(NamedTuple):
    """`text` is a JSON Schema, a regular expression, a JSON list of strings, or a grammar in Lark or GBNF. `field` is
    the client's name for it."""

    field: str
    kind: Kind
    text: str
    any_whitespace: bool = True  # False: no whitespace between the parts of a JSON value
    prefix: str = ""  # Lark rules for the whole output; they call this structure `@answer`


def from_schema(field: str, schema: Any, any_whitespace: bool = True) -> Structure:
    """From a JSON Schema, decoded or as text. Raises ApiError 400."""
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
    """From a list of possible outputs. Raises ApiError 400."""
    if not choices or not all(choices):
        raise invalid(field, f"{field} must have at least one text in it, and no empty one")
    if len(choices) > MAX_CHOICES:
        raise invalid(field, f"{field} has {len(choices)} texts; at most {MAX_CHOICES} are possible")
    return Structure(field, "choice", orjson.dumps(list(choices)).decode())


def check_size(structure: Structure) -> None:
    """Raises ApiError 400 if the text is too long to be parsed."""
    if (count := len(structure.text)) > MAX_GRAMMAR_CHARS:
        field = structure.field
        raise invalid(field, f"{field} has {count} characters; at most {MAX_GRAMMAR_CHARS} are possible")
