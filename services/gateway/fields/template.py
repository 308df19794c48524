"""What a chat template gets from a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.gateway.errors import invalid
from services.gateway.fields.messages import ChatMessage
from services.gateway.text.chat_values import ChatExtras


class TemplateInput(NamedTuple):
    """The arguments of TextTokenizer.encode_chat."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    extras: ChatExtras


def template_input(
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    variables: Mapping[str, Any],
    extras: ChatExtras,
) -> TemplateInput:
    """What the template of a request gets. Raises ApiError 400."""
    continues = extras.continue_final_message
    if continues and add_generation_prompt:
        name = "continue_final_message"
        raise invalid(name, f"{name} and add_generation_prompt exclude each other")
    shown = [message.for_template() for message in messages]
    return TemplateInput(shown, add_generation_prompt is not False and not continues, variables, extras)
