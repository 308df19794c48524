"""Turns a request of this API into a chat completion request, and the errors of a chat into the terms of this API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paceline.request_fields import METADATA, SAMPLING
from services.gateway.errors import ApiError
from services.gateway.openai import schema
from services.gateway.responses_api.items import Item, chat_messages
from services.gateway.responses_api.schema import FunctionTool, NamedFunction, ResponsesRequest, TextFormat

# Fields that both APIs have, under one name.
_SAME = (*SAMPLING, *METADATA, "user", "seed", "stop", "min_tokens", "ignore_eos", "chat_template_kwargs")
# A chat's fields as this API calls them. A field stands before each field that is a prefix of its name.
_RENAMED = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("tool_choice.function.name", "tool_choice.name"),
    ("messages", "input"),
)
# The first _NUM_DISTINCT names of _RENAMED are no English words. So in_own_terms() replaces them everywhere in the text
# of an error.
_NUM_DISTINCT = 5
_TOOL_FIELD = re.compile(r"^(tools\.\d+)\.function\.")


def chat_body(request: ResponsesRequest, history: Sequence[Item]) -> dict[str, Any]:
    """The body of the chat completion that answers the request. `history`: the items before its own."""
    body: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    body["messages"] = chat_messages(request.instructions, [*history, *request.input])
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.wants_logprobs:
        body["logprobs"], body["top_logprobs"] = True, request.top_logprobs or 0
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.tools:
        body["tools"] = [_chat_tool(tool) for tool in request.tools]
    if isinstance(request.tool_choice, NamedFunction):
        body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    elif request.tool_choice is not None:
        body["tool_choice"] = request.tool_choice
    if request.parallel_tool_calls is not None:
        body["parallel_tool_calls"] = request.parallel_tool_calls
    return body


def parse_chat(body: dict[str, Any], max_model_len: int) -> schema.ChatRequest:
    """The chat completion in a body that chat_body() made. Raises ApiError 400 in the terms of this API."""
    try:
        return schema.parse(schema.ChatRequest, body, max_model_len)
    except ApiError as error:
        raise in_own_terms(error) from None


def in_own_terms(error: ApiError) -> ApiError:
    """The same error with the names of this API's fields."""
    if error.param is None:
        return error
    param, message = _own_name(error.param), error.message
    if param != error.param:
        message = message.replace(error.param, param)
    for chat_name, own_name in _RENAMED[:_NUM_DISTINCT]:
        message = message.replace(chat_name, own_name)
    return ApiError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s)


def _own_name(param: str) -> str:
    for chat_name, own_name in _RENAMED:
        if param == chat_name or param.startswith(chat_name + "."):
            return own_name + param[len(chat_name) :]
    return _TOOL_FIELD.sub(r"\1.", param)


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    inner = {"name": given.name, "strict": given.strict, "schema": given.schema_}
    return {"type": "json_schema", "json_schema": {name: value for name, value in inner.items() if value is not None}}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {name: value for name in _TOOL_FIELDS if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}


_TOOL_FIELDS = ("name", "description", "parameters", "strict")
