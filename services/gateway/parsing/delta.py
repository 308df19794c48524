"""What a piece of a model's text adds to the assistant's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallDelta:
    """A part of a tool call. `name` is set only in the first part of a call."""

    index: int
    name: str | None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """A part of a message. Parts of one call follow each other, so each call has one entry in `calls`.

    In the message, `continued` comes before the other parts, and new calls come last.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def continued(self) -> str:
        """More arguments of the call that an earlier part has begun."""
        return "".join(call.arguments for call in self.calls if call.name is None)

    def begin_call(self, index: int, name: str) -> None:
        """A call begins."""
        self.calls.append(CallDelta(index, name))

    def add_arguments(self, index: int, text: str) -> None:
        """More of a call's arguments."""
        if not text:
            return
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index, None))
        self.calls[-1].arguments += text


def earliest(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first marker in the text begins, and which one it is; (-1, "") if there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def settled(text: str, markers: Sequence[str]) -> int:
    """How many characters of a text can be shown. The text must not contain a complete marker. An incomplete marker or
    white space at the end of the text is not shown, because a marker may follow."""
    cut = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:length]):
                cut = min(cut, len(text) - length)
                break
    return len(text[:cut].rstrip())
