"""Objects inside a request that take no unknown field."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class ClosedPart(BaseModel):
    """An object inside a request. A field that it does not have is refused with its path (as_api_error), so that a
    misspelled field is not ignored. An unknown field with the value null is dropped, as at the top of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and (unknown := value.keys() - _names(cls)):
            return {name: given for name, given in value.items() if given is not None or name not in unknown}
        return value


@cache
def _names(cls: type[ClosedPart]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in cls.model_fields.items())
