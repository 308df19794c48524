"""Types of single request fields, where pydantic accepts too much or gives an unclear error."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from services.gateway.fields.numbers import Number, integer

# The error for `add_special_tokens`.
NOT_FOR_CHATS = "is not supported for chats, because the template adds them (omit it, or send false)"

Uint32 = Annotated[int, BeforeValidator(integer), Field(ge=0, lt=2**32)]


def _token_ids(value: Any) -> array[int]:
    """Packed token ids. A list takes ten times the memory, and ten times as long to check."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        value = _whole_numbers(value)
    try:
        return array("i", value)
    except OverflowError:
        wrong = next(token for token in value if not -(2**31) <= token < 2**31)
        raise ValueError(f"token id {wrong} is out of vocabulary") from None


def _whole_numbers(value: Any) -> list[int]:
    """Token ids that a client has written as 7.0."""
    if not isinstance(value, list) or set(map(type, value)) - {int, float}:
        raise ValueError("must be a list of token ids (integers)")
    if not all(map(float.is_integer, map(float, value))):
        raise ValueError("must be a list of token ids (integers)")
    return list(map(int, value))


def _prompt(value: Any) -> Any:
    """Check a prompt by hand. A pydantic union tries one branch after another, and its errors name branches instead of
    the mistake. list_limits.py limits the number of prompts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be an empty list")
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if kinds in ({int}, {float}, {int, float}):
        return _token_ids(value)
    if kinds == {list} and all(set(map(type, entry)) <= {int} for entry in value):
        return [_token_ids(entry) for entry in value]
    raise ValueError("must hold strings only, or token ids (integers) only, or lists of token ids only")


def _stop(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and {type(entry) for entry in value} <= {str}:
        return value
    raise ValueError("must be a string or a list of strings")


def _logit_bias(value: Any) -> Any:
    """Convert the keys, because JSON has no integer keys."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if wrong := [key for key in value if not re.fullmatch(r"-?[0-9]{1,10}", key)]:
        shown = ", ".join(repr(key[:40]) for key in wrong[:10])
        what = "keys that are no token ids" if len(wrong) > 1 else "a key that is no token id"
        raise ValueError(f"has {what}: {shown}")
    biases = {int(token): bias for token, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("names a token twice")
    return biases


def _bad_words(value: Any) -> Any:
    if isinstance(value, list) and all(
        isinstance(word, str) or (isinstance(word, list) and set(map(type, word)) <= {int}) for word in value
    ):
        return value
    raise ValueError("must be a list of strings and lists of token ids")


def _no_seed(value: Any) -> Any:
    """Map -1, vLLM's other way to give no seed, to None."""
    value = integer(value)
    if type(value) is float and value.is_integer() and abs(value) >= 2.0**63:
        raise ValueError("must fit into 64 bits")  # orjson's float for a longer integer
    return None if type(value) is int and value == -1 else value


def _no_logprobs(value: Any) -> Any:
    """Map false to None: chats use a bool, and some clients send it to completions too."""
    return None if value is False else integer(value)


def _none_added(value: bool | None) -> bool | None:
    """Refuse to add special tokens to a chat."""
    if value:
        raise ValueError(NOT_FOR_CHATS)
    return value


def _early_stopping(value: Any) -> Any:
    if value is True or value is False or value == "never":
        return value
    raise ValueError('must be true, false or "never"')


def _variables(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(v, str | int | float | bool) for v in value.values()):
        raise ValueError("must be an object of strings, numbers and booleans")
    return value


# Lists of token ids become arrays of 32-bit integers.
_WrittenPrompt = str | list[str] | list[int] | list[list[int]]
Prompt = Annotated[
    str | list[str] | Sequence[int] | list[Sequence[int]],
    PlainValidator(_prompt, json_schema_input_type=_WrittenPrompt),
]
TokenIds = Annotated[Sequence[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Stop = Annotated[list[str], BeforeValidator(_stop, json_schema_input_type=str | list[str] | None)]
LogitBias = Annotated[dict[int, Number], BeforeValidator(_logit_bias, json_schema_input_type=dict[str, float])]
# Strings (banned as they are and after a space), or token ids.
BadWords = Annotated[list[str | list[int]], PlainValidator(_bad_words, json_schema_input_type=list[str | list[int]])]
Seed = Annotated[int | None, BeforeValidator(_no_seed)]
NumLogprobs = Annotated[
    int | None, BeforeValidator(_no_logprobs, json_schema_input_type=int | str | Literal[False] | None)
]
NoneAdded = Annotated[bool | None, AfterValidator(_none_added)]
EarlyStopping = Annotated[bool | str, BeforeValidator(_early_stopping, json_schema_input_type=bool | Literal["never"])]
Variables = Annotated[dict[str, Any], BeforeValidator(_variables, json_schema_input_type=dict[str, str | float | bool])]
