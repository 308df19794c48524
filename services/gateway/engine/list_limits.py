"""Limits on the lengths of lists in a request, checked before any loop over their entries.

A body within its size limit can hold millions of entries, and the event loop would serve no other request meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.engine.request import MAX_RETENTION_RANGES, MAX_STOP_STRINGS, too_long
from services.gateway.engine.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
)
from services.gateway.errors import ApiError, invalid

MAX_PROMPTS = 128
MAX_INPUTS = 2048  # of an embedding request: OpenAI's limit
MAX_MESSAGES = 16384
MAX_PARTS = 16384  # of all messages together
MAX_TEMPLATE_VARIABLES = 1024
MAX_TOOLS = 128  # OpenAI's limit
MAX_DETOKENIZED = 2**17  # or the model's context length, if that is larger
MAX_TRUNCATED = 2**17  # tokens of a prompt that may be cut; or the model's context length, if that is larger

# The largest number of entries, and the word for an entry.
_ENTRIES = {
    "stop": (MAX_STOP_STRINGS, "stop strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "stop tokens"),
    "logit_bias": (MAX_BIASED_TOKENS, "tokens"),
    "bad_words": (MAX_BAD_WORDS, "entries"),
    "allowed_token_ids": (MAX_ALLOWED_TOKENS, "tokens"),
    "cache_retention": (MAX_RETENTION_RANGES, "ranges"),
    "chat_template_kwargs": (MAX_TEMPLATE_VARIABLES, "entries"),
    "tools": (MAX_TOOLS, "tools"),
}


def check_length(name: str, count: int, prefix: str = "", field: str = "") -> None:
    """Check the length of the list `name`. `prefix` and `field` (if the list has another name) locate the list in the
    request. Raises ApiError 400."""
    most, things = _ENTRIES[name]
    if count > most:
        where = prefix + (field or name)
        raise invalid(where, f"{where} has {count} {things}; at most {most} are possible")


def long_bad_word(name: str, count: int) -> ApiError:
    """The error for an entry with `count` tokens."""
    return invalid(name, f"{name}: an entry has 1 to {MAX_BAD_WORD_TOKENS} tokens, not {count}")


def check_lengths(body: Mapping[str, Any], max_model_len: int) -> None:
    """Check all lists of a JSON body. Raises ApiError 400 for a list that is too long. The schema reports values of a
    wrong type."""
    for name in _ENTRIES.keys() & body.keys():
        value = body[name]
        if isinstance(value, list | dict):
            check_length(name, len(value))
    for word in _list(body, "bad_words"):
        if isinstance(word, list) and len(word) > MAX_BAD_WORD_TOKENS:
            raise long_bad_word("bad_words", len(word))
    most = max(MAX_DETOKENIZED, max_model_len)
    if len(tokens := _list(body, "tokens")) > most:
        raise invalid("tokens", f"tokens has {len(tokens)} tokens; at most {most} are possible")
    can_cut = body.get("truncate_prompt_tokens") is not None
    longest = max(MAX_TRUNCATED, max_model_len) if can_cut else max_model_len
    _check_prompt("prompt", _list(body, "prompt"), longest, MAX_PROMPTS)
    _check_prompt("input", _list(body, "input"), longest, MAX_INPUTS)
    _check_chat(_list(body, "messages"), max_model_len)


def _check_prompt(name: str, prompt: list[Any], max_model_len: int, most: int) -> None:
    if not prompt:
        return
    if isinstance(prompt[0], int):
        if len(prompt) > max_model_len:
            raise too_long(name, str(len(prompt)), max_model_len)
        return
    if len(prompt) > most:
        raise invalid(name, f"{name}: has {len(prompt)} {name}s; at most {most} are possible")
    for one in prompt:
        if isinstance(one, list) and len(one) > max_model_len:
            raise too_long(name, str(len(one)), max_model_len)


def check_messages(count: int, max_model_len: int) -> None:
    """A chat template writes at least a token for each message. Raises ApiError 400."""
    if count > (most := min(MAX_MESSAGES, max_model_len)):
        raise invalid("messages", f"messages: has {count} messages; at most {most} are possible")


def _check_chat(messages: list[Any], max_model_len: int) -> None:
    check_messages(len(messages), max_model_len)
    if (num_parts := sum(len(_list(message, "content")) for message in messages)) > MAX_PARTS:
        raise invalid("messages", f"messages: the contents have {num_parts} parts; at most {MAX_PARTS} are possible")


def _list(holder: Any, name: str) -> list[Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, list) else []
