"""The tools of a chat: functions that the model may call, and which calls the answer must have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from services.gateway.errors import invalid
from services.gateway.fields.closed import ClosedPart
from services.gateway.parsing.grammar import GrammarTool

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("none", "auto", "required")


class _OpenPart(BaseModel):
    """Its unknown fields are accepted: the chat template prints a tool with all its fields."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


def check_name(value: str) -> str:
    """The name of a function. Raises ValueError."""
    if not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits, underscores, dots and dashes")
    return value


def check_parameters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema of a function's arguments. Raises ValueError."""
    if value is not None and value.get("type", "object") != "object":
        raise ValueError("must be a JSON Schema with the type object")
    return value


class Function(_OpenPart):
    """A function that the model may call. `parameters`: a JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    _check_name = field_validator("name")(check_name)
    _check_parameters = field_validator("parameters")(check_parameters)


class Tool(_OpenPart):
    """A tool of a request."""

    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(value)
        tool._given = value if isinstance(value, dict) else {}
        return tool

    def for_template(self) -> dict[str, Any]:
        """The tool as the client wrote it: templates print it with all its fields, in their order."""
        return self._given

    def for_grammar(self) -> GrammarTool:
        """The tool for a grammar of calls."""
        function = self.function
        return GrammarTool(function.name, function.parameters or None, bool(function.strict))


class ChosenFunction(ClosedPart):
    """The name of the function that the model must call."""

    name: str


class NamedChoice(ClosedPart):
    """The function that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value in _CHOICES:
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        # Checked here, because pydantic's errors for a union show the names of its types as if they were fields.
        return NamedChoice.model_validate(value)
    shape = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f'must be "none", "auto", "required" or {shape}')


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice, BeforeValidator(_choice)]


def check_tools(tools: Sequence[Tool], choice: str | NamedChoice | None) -> None:
    """Raises ApiError 400 that names the field at fault."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            field = f"tools.{index}.function.name"
            raise invalid(field, f"{field}: {name!r} is the name of an earlier tool, too")
        names.add(name)
    if choice == "required" and not tools:
        raise invalid("tool_choice", 'tool_choice "required" is only possible with tools')
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        message = f"tool_choice names the function {choice.function.name[:128]!r}, which is not in tools"
        raise invalid("tool_choice.function.name", message)


def chosen(tools: Sequence[Tool], choice: str | NamedChoice | None) -> list[Tool]:
    """The tools that the answer may call."""
    if isinstance(choice, NamedChoice):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return [] if choice == "none" else list(tools)
