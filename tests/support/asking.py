"""A client that gets its answer although services die, and notes when each part arrived."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import httpx

from services.client import PacelineError
from tests.support.asking_batches import ask_batch
from tests.support.asking_grpc import ask_grpc
from tests.support.sse import Event, alike, told

ATTEMPTS = 200
PAUSE_S = 0.2
GRPC = "grpc"
RESPONSES, MESSAGES, BATCHES = "/v1/responses", "/v1/messages", "/v1/batches"
LAST_TYPES = ("response.completed", "response.incomplete", "message_stop")


class Gateway(NamedTuple):
    url: str
    target: str  # of gRPC


Cause = Literal["gave up", "lost", "sent"]


class Break(NamedTuple):
    """Why the client had to ask for an answer again.

    Times on the event loop's clock: the client asked at `asked_s`, nothing came after `silent_since_s`, and the answer
    broke at `time_s`.

    "gave up": the client stopped waiting, by its read timeout or its pings. "lost": the connection broke or could not
    be opened. "sent": the server sent an error or ended the answer early.
    """

    kind: Cause
    why: str
    gateway: Gateway
    asked_s: float
    silent_since_s: float
    time_s: float


@dataclass(frozen=True)
class Question:
    """What the client asks for. Reports show `name`, the kind of question.

    With the path GRPC, `body` has the arguments of the Python client. With BATCHES, it has `lines`.
    """

    name: str
    path: str
    body: dict[str, Any]
    cancel_after: int | None = None  # events


@dataclass
class Answer:
    """What has come so far. `times` (of the loop's clock) has one entry for each event, discarded events included."""

    question: Question
    events: list[Event] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    refusal: str = ""  # why the client stopped asking: another attempt would not change it
    is_done: bool = False
    is_cancelled: bool = False

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.times.append(asyncio.get_running_loop().time())

    def broke(self, kind: Cause, why: str, gateway: Gateway, asked_s: float) -> None:
        silent_since_s = max(asked_s, self.times[-1]) if self.times else asked_s
        self.breaks.append(Break(kind, why, gateway, asked_s, silent_since_s, asyncio.get_running_loop().time()))

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time between two events after `since_s`, or between `since_s` and the first of them."""
        times = [since_s, *(time for time in self.times if time >= since_s)]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def differs(self, right: Answer) -> str:
        """How this answer differs from `right`, the undisturbed answer; empty if it does not.

        A cancelled answer must be a beginning of `right`.
        """
        mine, whole = _knowledge(self), _knowledge(right)
        if self.is_cancelled:
            wrong = [text for index, text in mine["texts"].items() if not whole["texts"][index].startswith(text)]
            return f"{wrong} is not what {whole['texts']} begins with" if wrong else ""
        if not self.is_done:
            return f"did not end: {self.refusal or self.breaks}"
        different = [name for name in mine if not alike(mine[name], whole[name])]
        return "; ".join(f"{name}: {_apart(str(mine[name]), str(whole[name]))}" for name in different)


def _apart(mine: str, whole: str) -> str:
    """Shows where two texts begin to differ."""
    pairs = enumerate(zip(mine, whole, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(mine), len(whole)))
    return f"{mine[max(0, at - 30) : at + 50]!r} instead of {whole[max(0, at - 30) : at + 50]!r}"


def _knowledge(answer: Answer) -> dict[str, Any]:
    known = asdict(told(answer.events))
    for usage in known["rest"]:
        if isinstance(usage, dict):
            usage.pop("prompt_tokens_details", None)  # what was found in the cache is no part of the answer
    known["heads"] = len(known["heads"])
    for calls in known["calls"].values():
        for call in calls.values():
            call["id"] = bool(call["id"])  # depends on the answer's id, which depends on the idempotency key
    return known


def asker(read_timeout_s: float) -> httpx.AsyncClient:
    """An answer that is silent for longer than `read_timeout_s` is asked for again."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(10.0, read=read_timeout_s)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)


async def ask(http: httpx.AsyncClient, gateways: Sequence[Gateway], key: str, answer: Answer) -> None:
    """Ask one gateway after the other for the events after the last one that arrived, until the answer is whole
    or ATTEMPTS requests were made. A refusal that no other attempt would change raises AssertionError; with GRPC and
    BATCHES it is noted in `refusal`.
    """
    question = answer.question
    if question.path == GRPC:
        try:
            await ask_grpc(gateways, answer)
        except PacelineError as error:
            answer.refusal = f"{error.code.name}: {error}"
        return
    if question.path == BATCHES:
        await ask_batch(http, gateways, answer)
        return
    clock = asyncio.get_running_loop().time
    headers = {"Idempotency-Key": key}
    for gateway in itertools.islice(itertools.cycle(gateways), ATTEMPTS):
        asked_s = clock()
        kind: Cause = "sent"
        try:
            method, path, body = _next_request(answer)
            async with http.stream(method, gateway.url + path, json=body, headers=headers) as response:
                if response.status_code == 200:
                    why = await _read(response, answer, headers)
                else:
                    why = f"{response.status_code} {(await response.aread()).decode()}"
                    assert response.status_code in (409, 429) or response.status_code >= 500, why
        except httpx.TimeoutException as error:
            kind, why = "gave up", repr(error)
        except httpx.TransportError as error:
            kind, why = "lost", repr(error)
        if answer.is_done or answer.is_cancelled:
            return
        answer.broke(kind, why, gateway, asked_s)
        await asyncio.sleep(PAUSE_S)


def _next_request(answer: Answer) -> tuple[str, str, dict[str, Any] | None]:
    """Method, path and body of the next request."""
    question = answer.question
    if question.path == RESPONSES and answer.events:
        first, last = (json.loads(answer.events[index].data) for index in (0, -1))
        query = f"stream=true&starting_after={last['sequence_number']}"
        return "GET", f"{RESPONSES}/{first['response']['id']}?{query}", None
    if question.path == MESSAGES:
        answer.events.clear()  # its events have no ids, so the answer starts again
    return "POST", question.path, question.body


async def _read(response: httpx.Response, answer: Answer, headers: dict[str, str]) -> str:
    """Reads until the stream ends or breaks. Returns why it broke."""
    if not answer.question.body.get("stream"):
        answer.add(Event("", (await response.aread()).decode()))
        answer.is_done = True
        return ""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, fields[name] = line.partition(": ")
            continue
        event, fields = Event(fields.get("id", ""), fields["data"]), {}
        data = {} if event.data == "[DONE]" else json.loads(event.data)
        kind = data.get("type")
        if kind == "error" or (kind is None and "error" in data):
            return event.data
        if kind == "ping":
            continue
        answer.add(event)
        if kind is None:
            headers["Last-Event-ID"] = event.id
        if event.data == "[DONE]" or kind in LAST_TYPES:
            answer.is_done = True
            return ""
        if answer.question.cancel_after is not None and len(answer.events) >= answer.question.cancel_after:
            answer.is_cancelled = True
            return ""
    return "the stream ended early"
