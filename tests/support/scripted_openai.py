"""An OpenAI server that answers as a test says, and records what it was asked."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedOpenAI:
    """`answers`: for each request to /v1/chat/completions, a status and the body; bytes are sent unchanged."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    def streams(self, *deltas: dict[str, str], reason: str | None = "stop") -> None:
        """The next answer: these deltas, as OpenAI streams them. `reason` None: the stream ends without one."""
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        if reason is not None:
            events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": len(deltas)}})
        self.streams_events(*events)

    def streams_events(self, *events: dict[str, Any]) -> None:
        lines = [b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events]
        self.answers.append((200, b"".join([*lines, b"data: [DONE]\n\n"])))

    def refuses(self, status: int, message: str) -> None:
        self.answers.append((status, json.dumps({"error": {"message": message, "type": "x"}}).encode()))


@contextmanager
def scripted_openai(tls: ssl.SSLContext | None = None) -> Iterator[ScriptedOpenAI]:
    script = ScriptedOpenAI()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.keys.append(self.headers.get("Authorization"))
            self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self) -> None:
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send(*script.answers.pop(0))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        script.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield script
        finally:
            server.shutdown()
