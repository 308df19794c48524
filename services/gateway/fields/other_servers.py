"""Fields of OpenAI, vLLM and other servers that are not served here: refused by name, or ignored on purpose. A field in
no table is refused, as by OpenAI, so that a misspelled field is not ignored.

Tests compare the tables with vLLM's request classes and OpenAI's specification, so that all of their fields are known.
Tests also compare the tables with docs/unserved-fields.md, which shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from services.gateway.errors import MAX_NAMED_FIELDS, ApiError, invalid, unknown_parameter
from services.gateway.fields.numbers import flag, integer

# Fields that would change the result, with the values that change nothing (null is always such a value). A kind of
# request that declares such a field serves it; all other kinds refuse it.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": ([],),
    "echo": (False,),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": ([],),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
# Fields that other servers call differently.
RENAMED: dict[str, str] = {
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
}
# Fields that change nothing here, whatever their value, and why.
IGNORED: dict[str, str] = {
    "metadata": "for chats that OpenAI stores; none are stored here",
    "mm_payload": "of vLLM's render endpoints; vLLM ignores it when it generates",
    "prompt_cache_key": "the prefix cache finds a conversation by its tokens",
    "prompt_cache_options": "the prefix cache finds a conversation by its tokens",
    "prompt_cache_retention": "the prefix cache finds a conversation by its tokens",
    "return_mm_kwargs": "of vLLM's render endpoints; vLLM ignores it when it generates",
    "return_token_offsets": "of vLLM's render endpoints; vLLM ignores it when it generates",
    "safety_identifier": "names an end user for OpenAI's abuse detection",
    "service_tier": "there is only one tier; `priority` puts a request before others",
    "session_id": "groups requests for vLLM's KV connectors; the prefix cache finds a conversation by its tokens",
    "store": "chats are not stored; responses are",
}
# The types of ignored fields in all APIs. Another type is refused. A field that is not here takes any value.
IGNORED_TYPES: dict[str, type] = {
    "context_management": dict,
    "diagnostics": dict,
    "fallback_credit_token": str,
    "max_tool_calls": int,
    "metadata": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "return_mm_kwargs": bool,
    "return_token_offsets": bool,
    "safety_identifier": str,
    "service_tier": str,
    "session_id": str,
    "store": bool,
    "user_profile_id": str,
}
_JSON_TYPES: dict[type, str] = {bool: "boolean", dict: "object", int: "integer", str: "string"}
# Refused fields of messages, and ignored fields of all objects inside a request, by their paths.
REFUSED_IN_MESSAGES: tuple[str, ...] = ("audio", "function_call", "task", "tools")
IGNORED_INSIDE: dict[str, str] = {
    "messages.refusal": "says why the assistant refused; no template shows it",
    "response_format.json_schema.description": "describes the schema to a model; here templates get no schema",
    "response_format.json_schema.name": "describes the schema to a model; here templates get no schema",
    "response_format.json_schema.strict": "the output always follows the schema",
    "stream_options.include_obfuscation": "adds random text for padding, and events here have none",
}


def refuse_unserved(
    served: Set[str],
    body: Mapping[str, Any],
    *,
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    ignored: Mapping[str, str] = IGNORED,
    renamed: Mapping[str, str] = RENAMED,
) -> None:
    """Refuse a body with fields that are not served; the error names up to 10. Ignored fields and neutral values of
    refused fields are accepted. `served`: the names of the fields that are served. `refused`, `ignored` and `renamed`:
    as the tables of these names. Raises ApiError 400."""
    unserved = body.keys() - served
    if not unserved:  # nearly every request
        return
    errors: list[ApiError] = []
    for name in (name for name in body if name in unserved and body[name] is not None):  # in the client's order
        if name in ignored:
            error = _wrong_type(name, body[name])
        elif name in renamed:
            error = invalid(name, f"{name} is called {renamed[name]} here", code="unsupported_value")
        else:
            error = _refusal(name, body[name], refused)
        errors += [] if error is None else [error]
    if not errors:
        return
    message = "; ".join(error.message for error in errors[:MAX_NAMED_FIELDS])
    if len(errors) > MAX_NAMED_FIELDS:
        message += f"; and {len(errors) - MAX_NAMED_FIELDS} more"
    raise invalid(errors[0].param, message, code=errors[0].code)


def _wrong_type(name: str, value: Any) -> ApiError | None:
    kind = IGNORED_TYPES.get(name)
    if kind in (None, type(value), type(integer(value)), type(flag(value))):  # "8" and "true" as in served fields
        return None
    return invalid(name, f"{name}: must be of the type {_JSON_TYPES[kind]}", code="invalid_type")


def describe_unserved(
    schema: dict[str, Any],
    *,
    refused: Mapping[str, tuple[Any, ...]],
    ignored: Mapping[str, str],
    renamed: Mapping[str, str],
) -> None:
    """Forbid additional properties in the JSON Schema of a request (/openapi.json), and add the fields that are not
    served, each with the values that refuse_unserved() accepts."""
    described: dict[str, Any] = {
        name: {"enum": [*neutral, None], "description": "Not supported. These values change nothing."}
        for name, neutral in refused.items()
    }
    for name, ours in renamed.items():
        described[name] = {"type": "null", "description": f"Called {ours} here."}
    for name, why in ignored.items():
        kind = IGNORED_TYPES.get(name)
        types = {} if kind is None else {"type": [_JSON_TYPES[kind], "null"]}
        described[name] = types | {"description": f"Ignored: {why}."}
    schema["properties"] = described | schema["properties"]
    schema["additionalProperties"] = False


def _refusal(name: str, value: Any, refused: Mapping[str, tuple[Any, ...]]) -> ApiError | None:
    if name not in refused:
        return unknown_parameter(name)
    # In Python a bool is an int. Here the two types differ.
    neutral = refused[name]
    if any(type(value) is type(other) and value == other for other in neutral):
        return None
    wanted = ", ".join(json.dumps(other) for other in neutral[:1]) or "null"
    return invalid(name, f"{name} is not supported yet (leave it out, or {wanted})", code="unsupported_value")
