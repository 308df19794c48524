"""The form that a text is to have, as clients state it, and the grammar that makes the workers keep to it.

llguidance (https://github.com/guidance-ai/llguidance) reads them all; docs/sampling.md says what it knows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import orjson
from llguidance import LLMatcher, grammar_from

from services.gateway.errors import ApiError, invalid
from services.runtime.grammars import LIMITS, one_line

MAX_GRAMMAR_CHARS = 2**16  # as the scheduler has it
MAX_CHOICES = 4096
# Between the parts of a JSON value: enough for deep indentation, and a model that loops gets out of it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


class Structure(NamedTuple):
    """`text` is a JSON Schema, a regular expression, a list of strings in JSON, or a grammar in Lark or GBNF; `field`
    is what the client calls it."""

    field: str
    kind: Literal["json_schema", "regex", "choice", "grammar"]
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


@lru_cache(maxsize=64)
def grammar_of(structure: Structure) -> str:
    """What SamplingParams.grammar takes. Raises ApiError 400 if it has a mistake or is too large. Takes up to 30 ms."""
    field, kind, text, any_whitespace = structure
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _too_long(field, len(text))
    try:
        if kind == "json_schema":
            whitespace: Any = {"whitespace_pattern": WHITESPACE} if any_whitespace else {"whitespace_flexible": False}
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=whitespace)
        else:
            grammar = grammar_from(kind, text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{field}: {one_line(str(error))}") from None
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise _too_long(field, len(grammar))
    if mistake := LLMatcher.validate_grammar(grammar, limits=LIMITS):
        raise invalid(field, f"{field}: {one_line(mistake)}")
    return grammar


def _too_long(field: str, num_chars: int) -> ApiError:
    return invalid(field, f"{field} has {num_chars} characters; at most {MAX_GRAMMAR_CHARS} are possible")
