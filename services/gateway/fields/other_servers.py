"""Fields of OpenAI, vLLM and other servers that are not served here: refused by name, or ignored on purpose.

Tests compare the tables with vLLM's request classes, so that no field of theirs passes unread, and with
docs/openai-api.md, which shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from services.gateway.errors import ApiError, invalid

# Unsupported fields that would change the result, with the values that change nothing (null is always such a value).
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),  # in chats: the template has them
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
    "mm_payload": "of vLLM's render endpoints; vLLM ignores it when it generates",
    "return_mm_kwargs": "of vLLM's render endpoints; vLLM ignores it when it generates",
    "return_token_offsets": "of vLLM's render endpoints; vLLM ignores it when it generates",
    "session_id": "groups requests for vLLM's KV connectors; the prefix cache finds a conversation by its tokens",
}
# The same for objects inside a request, by their paths. structured_outputs refuses all names but its own.
REFUSED_IN_MESSAGES: tuple[str, ...] = ("audio", "function_call", "task", "tools")
IGNORED_INSIDE: dict[str, str] = {
    "messages.refusal": "says why the assistant refused; no template shows it",
    "response_format.json_schema.description": "is for a model that sees it; templates get no schema",
    "response_format.json_schema.name": "is for a model that sees it; templates get no schema",
    "response_format.json_schema.strict": "the output always follows the schema",
}


def refuse_unserved(
    served: Set[str], body: Mapping[str, Any], where: str = "", refused: Mapping[str, tuple[Any, ...]] = REFUSED
) -> None:
    """Refuse every unsupported field, by name. `served`: the names of the fields that are served. `where`: the path of
    the object `body`. `refused`: as REFUSED. Raises ApiError 400."""
    unserved = body.keys() - served
    if not unserved:  # nearly every request
        return
    named = [name for name in body if name in unserved]  # in the client's order
    errors = [error for name in named if (error := _refusal(name, body[name], where, refused)) is not None]
    if not errors:
        return
    message = errors[0].message if len(errors) == 1 else "; ".join(error.message for error in errors)
    raise invalid(errors[0].param, message, code="unsupported_value")


def _refusal(name: str, value: Any, where: str, refused: Mapping[str, tuple[Any, ...]]) -> ApiError | None:
    if value is None:
        return None
    if name in RENAMED:
        return invalid(where + name, f"{where}{name} is called {RENAMED[name]} here")
    if name not in refused:
        return None
    # In Python a bool is an int. Here the two types differ.
    neutral = refused[name]
    if any(type(value) is type(other) and value == other for other in neutral):
        return None
    wanted = ", ".join(json.dumps(other) for other in neutral[:1]) or "null"
    return invalid(where + name, f"{where}{name} is not supported yet (leave it out, or {wanted})")
