"""Numbers and flags: vLLM reads them from strings too, and integers from floats without a fraction."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from services.gateway.errors import MAX_NAMED_FIELDS, MAX_PATH_CHARS, ApiError, invalid, unknown_parameter

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}(\.0{1,20})?")
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_FLAGS = {"true": True, "false": False}
# orjson decodes an integer that needs more than 64 bits as a float, which has lost digits.
_EXACT = 2.0**53


def integer(value: Any) -> Any:
    """8 for "8", "8.0" and 8.0. Anything else is unchanged, and pydantic refuses what is no integer."""
    kind = type(value)
    if kind is str and _INTEGER.fullmatch(text := value.strip()):
        return int(text.partition(".")[0])
    if kind is float and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def number(value: Any) -> Any:
    """0.5 for "0.5". Anything else is unchanged, also "nan" and "inf"."""
    if type(value) is str and _NUMBER.fullmatch(text := value.strip()):
        return float(text)
    return value


def flag(value: Any) -> Any:
    """True for "true", False for "false". Anything else is unchanged."""
    return _FLAGS.get(value.strip().lower(), value) if type(value) is str else value


Integer = Annotated[int, BeforeValidator(integer, json_schema_input_type=int | str)]
Number = Annotated[float, BeforeValidator(number, json_schema_input_type=float | str)]
Flag = Annotated[bool, BeforeValidator(flag, json_schema_input_type=bool | str)]
KINDS: dict[type, Any] = {int: Integer, float: Number, str: str, bool: Flag}


def as_api_error(error: ValidationError) -> ApiError:
    """A 400 that names every wrong field, up to a limit. `param` is the first one."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    named = [_named(entry["loc"], entry["type"], entry["msg"]) for entry in found[:MAX_NAMED_FIELDS]]
    param, message, code = named[0]
    if len(found) > 1:
        more = f"; and {len(found) - MAX_NAMED_FIELDS} more" if len(found) > MAX_NAMED_FIELDS else ""
        message = f"{len(found)} fields are wrong: " + "; ".join(text for _, text, _ in named) + more
    return invalid(param, message, code=code)


def _named(location: tuple[int | str, ...], kind: str, text: str) -> tuple[str, str, str]:
    path = ".".join(str(part) for part in location)[:MAX_PATH_CHARS]
    text = text.removeprefix("Value error, ")
    if kind == "missing":
        return path, f"{path} is required", "missing_required_parameter"
    if kind == "extra_forbidden":
        unknown = unknown_parameter(path)
        return path, unknown.message, "unknown_parameter"
    return path, f"{path}: {text[0].lower()}{text[1:]}", "invalid_type"
