"""A protobuf message as plain values for JSON. protobuf's own MessageToDict and a validation of its result take ten
times as long, and a live view should cost nearly nothing."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_origin

from google.protobuf.message import Message
from pydantic import BaseModel


def as_dict(message: Message, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of the model, which the message has under the same names. Not for bytes, enums and optional fields."""
    values: dict[str, Any] = {}
    for name, part, is_list in _fields(model):
        value = getattr(message, name)
        if part is not None:
            value = [as_dict(one, part) for one in value] if is_list else as_dict(value, part)
        elif is_list:
            value = value[:]  # a plain list
        values[name] = value
    return values


@cache
def _fields(model: type[BaseModel]) -> tuple[tuple[str, type[BaseModel] | None, bool], ...]:
    """Of each field its name, the model of its value or of the list's values, and whether it is a list."""
    found = list[tuple[str, type[BaseModel] | None, bool]]()
    for name, field in model.model_fields.items():
        is_list = get_origin(field.annotation) is list
        kind: Any = get_args(field.annotation)[0] if is_list else field.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
        found.append((name, kind if is_model else None, is_list))
    return tuple(found)
