"""The history of a chat: what is sent with each question."""

from __future__ import annotations

Message = dict[str, str]


class ChatHistory:
    """A system prompt, the answered questions, and the question that is open.

    Each request repeats all earlier messages unchanged, so that the server finds them in its prefix cache.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[tuple[str, str]] = []
        self._open: str | None = None

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def ask(self, question: str) -> None:
        """Make it the open question. A question that got no answer is dropped."""
        self._open = question

    def answer(self, text: str) -> None:
        """Keep the answer to the open question. An empty answer leaves the question open, for retry()."""
        if self._open is not None and text:
            self._turns.append((self._open, text))
            self._open = None

    def retry(self) -> str | None:
        """Open the last question again, and forget its answer. None if there is no question."""
        if self._open is None and self._turns:
            self._open, _ = self._turns.pop()
        return self._open

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self._turns, self._open = [], None

    def messages(self) -> list[Message]:
        """What to send, with the open question at the end."""
        messages = [_message("system", self.system)] if self.system else []
        for question, answer in self._turns:
            messages += [_message("user", question), _message("assistant", answer)]
        return messages if self._open is None else [*messages, _message("user", self._open)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
