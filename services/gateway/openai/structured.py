"""Structured outputs: the fields of OpenAI's API and of vLLM that constrain the output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from services.gateway.errors import invalid
from services.gateway.fields.closed import ClosedPart
from services.gateway.grammars.structure import Structure, from_choices, from_schema

_ANY_OBJECT = {"type": "object"}


def _no_bare_schema(value: Any) -> None:
    if value is not None:
        raise ValueError('a schema belongs into {"type": "json_schema", "json_schema": {"schema": ...}}')


class JsonSchema(ClosedPart):
    """A JSON Schema. Its name, description and `strict` have no effect: the schema is always strict."""

    name: Any = None
    description: Any = None
    strict: Any = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(ClosedPart):
    """OpenAI's `response_format`: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    # Of llama.cpp and others: the schema without `json_schema` around it.
    schema_: Annotated[Any, AfterValidator(_no_bare_schema)] = Field(None, alias="schema")

    def structure(self) -> Structure | None:
        """The structure of the output; None for any text. Raises ApiError 400."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return from_schema("response_format", _ANY_OBJECT)
        if self.json_schema is None:
            field = "response_format.json_schema"
            raise invalid(field, f"{field} is required", code="missing_required_parameter")
        return from_schema("response_format.json_schema.schema", self.json_schema.schema_)


class StructuredOutputs(ClosedPart):
    """vLLM's `structured_outputs`: exactly one of five kinds of structure."""

    json_: Any = Field(None, alias="json")  # a JSON Schema, as an object or as text
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null_and_false(cls, value: Any) -> Any:
        """A field that is null or false is the same as an absent one."""
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if given is not None and given is not False}

    def structure(self) -> Structure:
        """The structure of the output. Raises ApiError 400."""
        any_whitespace = not self.disable_any_whitespace
        forms = []
        if self.json_ is not None:
            forms.append(from_schema("structured_outputs.json", self.json_, any_whitespace))
        if self.json_object:
            forms.append(from_schema("structured_outputs.json_object", _ANY_OBJECT, any_whitespace))
        if self.regex is not None:
            forms.append(Structure("structured_outputs.regex", "regex", self.regex))
        if self.choice is not None:
            forms.append(from_choices("structured_outputs.choice", self.choice))
        if self.grammar is not None:
            forms.append(Structure("structured_outputs.grammar", "grammar", self.grammar))
        if len(forms) != 1:
            names = "json, json_object, regex, choice and grammar"
            raise invalid("structured_outputs", f"structured_outputs needs one of {names}, and not {len(forms)}")
        return forms[0]
