"""Talks HTTP to an OpenAI-compatible server. One connection for each request in flight."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

from services.cli.arguments import plain
from services.cli.bench.load.prompts import Endpoint
from services.cli.bench.stats.records import INTERRUPTED, RequestRecord
from services.cli.bench.stats.reply import ReplyError, StreamedReply, error_code
from services.cli.http.event_lines import EventLines

CONNECT_TIMEOUT_S = 10.0
PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completion": "/completions"}
# Reason of a request that still ran when the stage's time was up, and of one that took too long.
UNFINISHED, TIMED_OUT = "unfinished at the end", "timeout"
MAX_MESSAGE = 300


class ServerRefuses(Exception):
    """The server cannot be used. The message is one line."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class LoadClient:
    """Use as an async context manager. Clock: time.perf_counter."""

    def __init__(self, url: str, api_key: str, endpoint: Endpoint, timeout_s: float, ca_file: str) -> None:
        self.url = url.rstrip("/")
        self._path = self.url + PATHS[endpoint]
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = _trusting(ca_file)
        # A client for each connection, because the pool of one client walks all its connections for each request:
        # with 128 connections, TTFT was 1 s longer (measured, httpx 0.28 and httpcore 1.0).
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for http in self._idle:
            await http.aclose()

    async def models(self) -> list[str]:
        """The names of the server's models. Raises ServerRefuses."""
        answer = await self._ask("GET", f"{self.url}/models", None)
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise ServerRefuses(f"{self.url}/models lists no models") from None

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request without a stream. Raises ServerRefuses."""
        return await self._ask("POST", self._path, body)

    async def stream(self, body: bytes, record: RequestRecord) -> str:
        """One streamed request, measured in `record`, which also gets its failure. Returns the text."""
        reply = StreamedReply(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, reply)
        except TimeoutError:
            record.error = TIMED_OUT
        except ReplyError as error:
            record.error = plain(str(error))
        except httpx.TransportError as error:
            record.error = _transport_reason(error)
        except asyncio.CancelledError as error:
            record.error = error.args[0] if error.args else INTERRUPTED
        if record.error:
            record.end_s = time.perf_counter()
        return reply.text

    async def _stream(self, body: bytes, reply: StreamedReply) -> None:
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        reply.record.sent_s = time.perf_counter()
        async with (
            self._connection() as http,
            http.stream("POST", self._path, content=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise ReplyError(_status_reason(response.status_code, await response.aread()))
            lines = EventLines()
            async for chunk in response.aiter_bytes():
                for line in lines.add(chunk):
                    reply.feed(line, time.perf_counter())
        reply.end(time.perf_counter())

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that no other request uses."""
        http = self._idle.pop() if self._idle else self._new_client()
        try:
            yield http
        finally:
            self._idle.append(http)

    def _new_client(self) -> httpx.AsyncClient:
        # No read or write timeout: stream() and _ask() limit the whole time of a request.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        return httpx.AsyncClient(headers=self._headers, timeout=timeout, verify=self._tls)

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._connection() as http:
                    response = await http.request(method, url, json=body)
        except TimeoutError:
            raise ServerRefuses(f"{url} did not answer within {self._timeout_s:g} s") from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerRefuses(f"{url}: {plain(str(error)) or type(error).__name__}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != 200:
            message = " ".join(_message(answer).split())[:MAX_MESSAGE]
            hint = "; give --api-key, or set PACELINE_API_KEY" if response.status_code == 401 else ""
            raise ServerRefuses(f"{url}: {response.status_code} {plain(message)}{hint}", response.status_code)
        if not isinstance(answer, dict):
            raise ServerRefuses(f"{url} does not answer with a JSON object: is it an OpenAI-compatible server?")
        return answer


def _trusting(ca_file: str) -> ssl.SSLContext:
    """The system's certificates, and those of a file. Raises OSError (also for a file without certificates)."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    return context


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error or "")


def _status_reason(status: int, content: bytes) -> str:
    """Status and code, the same for all requests that fail so."""
    try:
        code = error_code(orjson.loads(content))
    except ValueError:
        code = ""
    return f"HTTP {status} {code}".rstrip()


def _transport_reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "cannot connect"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
        return "connection lost"
    return type(error).__name__
