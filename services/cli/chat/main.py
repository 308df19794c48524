"""`paceline chat`: talks to a running server over OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from services.cli.arguments import Parser, console, plain, usage_error
from services.cli.chat.answers import ChatServer
from services.cli.chat.display import Display
from services.cli.chat.history import ChatHistory
from services.cli.chat.loop import ChatLoop
from services.cli.http.client import RequestFailed
from services.cli.http.endpoint import add_flags, find_endpoint
from services.cli.servers import NoAddress
from services.cli.waiting import waiting
from services.runtime.tls.files import TlsError

PROG = "paceline chat"


def parser() -> Parser:
    parser = Parser(
        prog=PROG, description=__doc__, epilog="Without a terminal, or with a QUESTION, it prints one answer and ends."
    )
    parser.add_argument("question", nargs="*", metavar="QUESTION", help="asks only this (default: a chat, or stdin)")
    parser.add_argument("--model", help="(default: the first that the server lists)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=float, metavar="T", help="(default: the model's)")
    add_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    arguments = parser().parse_args(argv)
    for stream in (sys.stdin, sys.stdout):  # characters that the locale's encoding lacks would raise an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "backslashreplace")
    question = " ".join(arguments.question).strip()
    is_interactive = not question and sys.stdin.isatty() and sys.stdout.isatty()
    if not question and not is_interactive:
        question = sys.stdin.read().strip()
        if not question:
            return usage_error(PROG, "there is no question: give it as an argument or on standard input")
    try:
        server = ChatServer(find_endpoint(arguments), _options(arguments))
    except (NoAddress, TlsError, ValueError) as error:
        return usage_error(PROG, str(error))
    try:
        return _chat(server, arguments, question)
    except RequestFailed as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    return {name: value for name, value in given.items() if value is not None}


def _chat(server: ChatServer, arguments: argparse.Namespace, question: str) -> int:
    """One answer, or the loop if there is no question. Raises RequestFailed."""
    out = console()
    with waiting(out, "waiting for the server"):
        model = arguments.model or server.model()
    conversation, display = ChatHistory(arguments.system), Display(out, is_interactive=not question)
    if question:
        conversation.ask(question)
        if display.show(server, model, conversation).reason == "length":
            print(f"{PROG}: the answer is cut: the limit of tokens is reached", file=sys.stderr)
        return 0
    display.note(f"{plain(model)} at {server.endpoint.url}. /help shows the commands, Ctrl-D ends the chat.")
    ChatLoop(server, model, conversation, display).run()
    return 0
