"""What a chat template gets from a client, and functions that list, replace and cut the strings in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.errors import invalid

# Of messages, tools, documents and chat_template_kwargs. A deeper value could exceed Python's recursion limit.
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ChatExtras:
    """What a chat template gets besides messages and variables. `template`: the source of a template that replaces the
    model's. With `continue_final_message` the prompt ends with the text of the last message, without its end token."""

    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None


NO_EXTRAS = ChatExtras()


def strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in a JSON value, keys too. Raises ApiError 400 for a value that is nested too deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        _check_depth(depth)
        for key, entry in value.items():
            yield key
            yield from strings(entry, depth + 1)
    elif isinstance(value, list | tuple):
        _check_depth(depth)
        for entry in value:
            yield from strings(entry, depth + 1)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value in which each string is changed, also in keys. `strings` has checked its depth."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): with_strings(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_strings(entry, change) for entry in value]
    return value


def without_end(text: str, final: str) -> str:
    """The rendered chat `text`, cut behind its last message `final`, by transformers' rule. Raises ApiError 400."""
    name = "continue_final_message"
    bare = final.strip()
    if not bare:
        raise invalid(name, f"{name}: the last message has no text to continue")
    begin = text.rfind(bare)
    if begin < 0:
        raise invalid(name, f"{name}: the chat template does not show the last message as it is")
    # The template may keep the space behind the text, or remove it.
    kept = final.lstrip()
    return text[: begin + len(kept if text[begin : begin + len(kept)] == kept else bare)]


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise invalid(
            "messages", f"messages, tools, documents and chat_template_kwargs may be nested {MAX_DEPTH} levels deep"
        )
