"""Prints the fields of vLLM's request classes as JSON: class name -> names. Runs in vLLM's environment."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_type_hints

from vllm.entrypoints.generate.base.protocol import JsonSchemaResponseFormat, ResponseFormat, StreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.renderers.chat_utils import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionToolMessageParam,
    CustomChatCompletionMessageParam,
)
from vllm.sampling_params import StructuredOutputsParams

MODELS: list[Any] = [
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeCompletionRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
    StreamOptions,
    ResponseFormat,
    JsonSchemaResponseFormat,
]
MESSAGES: list[Any] = [
    ChatCompletionAssistantMessageParam,
    ChatCompletionToolMessageParam,
    CustomChatCompletionMessageParam,
]

fields = {model.__name__: sorted(field.alias or name for name, field in model.model_fields.items()) for model in MODELS}
fields["messages"] = sorted({name for message in MESSAGES for name in get_type_hints(message)})
# vLLM uses names with an underscore internally.
public = (field.name for field in dataclasses.fields(StructuredOutputsParams) if not field.name.startswith("_"))
fields["StructuredOutputsParams"] = sorted(public)
print(json.dumps(fields, indent=1))
