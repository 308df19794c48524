"""The interactive chat: reads lines, runs /commands, and lets Ctrl-C stop an answer."""

from __future__ import annotations

import contextlib

from services.cli.arguments import plain
from services.cli.chat.answers import ChatServer
from services.cli.chat.display import Display
from services.cli.chat.history import ChatHistory
from services.cli.http.client import RequestFailed

PROMPT = "> "
HELP = """\
/reset         start a new conversation; the system prompt stays
/system TEXT   change the system prompt; without TEXT there is none
/retry         ask the last question again
/help          this text
/exit          end the chat, as Ctrl-D does
Ctrl-C stops an answer; its beginning stays in the conversation."""


class ChatLoop:
    """One person's chat with one server."""

    def __init__(self, server: ChatServer, model: str, conversation: ChatHistory, display: Display) -> None:
        self._server = server
        self._model = model
        self._conversation = conversation
        self._display = display

    def run(self) -> None:
        """Read and answer until Ctrl-D or /exit."""
        with contextlib.suppress(ImportError):  # not every Python has it; without it, lines cannot be edited
            import readline  # noqa: F401 - input() edits lines and keeps a history once it is imported
        while True:
            try:
                if not self._one():
                    return
            except KeyboardInterrupt:
                self._display.note("stopped")

    def _one(self) -> bool:
        """Read one line and act on it. False at the end of the chat."""
        try:
            line = input(PROMPT).strip()
        except EOFError:
            self._display.note("")
            return False
        except KeyboardInterrupt:
            self._display.note("\nCtrl-D or /exit ends the chat")
            return True
        if line.startswith("/"):
            return self._command(line)
        if line:
            self._ask(line)
        return True

    def _command(self, line: str) -> bool:
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                self._display.note(HELP)
            case "/reset":
                self._conversation.reset()
                self._display.note("a new conversation")
            case "/system":
                self._conversation.system = rest.strip()
                self._display.note("the system prompt is changed" if rest.strip() else "no system prompt")
            case "/retry":
                question = self._conversation.retry()
                if question is None:
                    self._display.problem("there is no question yet")
                else:
                    self._ask(question)
            case _:
                self._display.problem(f"there is no command {plain(name)} (see /help)")
        return True

    def _ask(self, question: str) -> None:
        self._conversation.ask(question)
        try:
            self._display.show(self._server, self._model, self._conversation)
        except RequestFailed as error:
            more = "; /reset starts a new conversation" if self._conversation.num_turns else ""
            self._display.problem(f"{error}{more if 'context' in str(error) else ''}")
