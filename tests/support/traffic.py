"""Constant mixed load on several gateways, as behind a load balancer; it notes wrong answers and errors."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.client import AsyncPacelineClient
from tests.support import load

Ask = Callable[[], Awaitable[Any]]


class NextGateway(httpx.AsyncBaseTransport):
    """Sends requests to the gateways in turn. Only if a gateway refuses the connection, the next gateway is tried."""

    def __init__(self, urls: list[str]) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._urls = [httpx.URL(url) for url in urls]
        self._turns = itertools.count()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        turn = next(self._turns)
        for attempt in itertools.count():
            target = self._urls[(turn + attempt) % len(self._urls)]
            request.url = request.url.copy_with(host=target.host, port=target.port)
            try:
                return await self._transport.handle_async_request(request)
            except httpx.ConnectError:
                if attempt == len(self._urls) - 1:
                    raise
        raise AssertionError

    async def aclose(self) -> None:
        await self._transport.aclose()


@dataclass
class Traffic:
    """Sends each kind of request again and again. `right`: the answer to each kind while no service is disturbed."""

    asks: dict[str, Ask]
    right: dict[str, Any] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """Asks for the right answers while no service is disturbed."""
        self.right = dict(zip(self.asks, await asyncio.gather(*(ask() for ask in self.asks.values())), strict=True))

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """While the block runs, keeps one request of each kind in flight. Then waits for the last requests."""
        over = asyncio.Event()

        async def repeat(kind: str, ask: Ask) -> None:
            while not over.is_set():
                try:
                    got = await ask()
                except Exception as error:
                    self.wrong.append(f"{kind}: {error!r}")
                    await asyncio.sleep(0.2)
                    continue
                self.done[kind] += 1
                if got != self.right[kind]:
                    self.wrong.append(f"{kind}: {got} instead of {self.right[kind]}")

        async with asyncio.TaskGroup() as group:
            for kind, ask in self.asks.items():
                group.create_task(repeat(kind, ask))
            try:
                yield
            finally:
                over.set()


def mixed(http: httpx.AsyncClient, grpc_client: AsyncPacelineClient, num_tokens: int, vocab: int) -> Traffic:
    """Streams, whole answers, two samples, chats over HTTP; whole answers and streams over gRPC; greedy and seeded."""
    prompts = load.random_prompts(8, 21, vocab)
    seeded = {"temperature": 1.0, "seed": 5, "max_tokens": num_tokens, "ignore_eos": True}

    async def stream(prompt: list[int], **options: object) -> str:
        got = await load.stream(http, load.Wanted(prompt, num_tokens), **options)
        if got.errors or got.finish_reason != "length":
            raise AssertionError(f"{got.errors}, finish_reason {got.finish_reason}")
        return got.text

    async def post(path: str, **body: object) -> list[str]:
        answer = await http.post(path, json=seeded | body)
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code} {answer.text}")
        return [choice.get("text") or choice["message"]["content"] for choice in answer.json()["choices"]]

    async def pieces(prompt: list[int]) -> list[int]:
        options: Any = seeded
        return [i async for piece in grpc_client.stream(token_ids=prompt, **options) for i in piece.token_ids]

    async def whole(prompt: list[int]) -> list[int]:
        got = await grpc_client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True)
        return list(got.token_ids)

    return Traffic(
        {
            "greedy stream": lambda: stream(prompts[0]),
            "seeded stream": lambda: stream(prompts[1], temperature=1.0, seed=7),
            "whole": lambda: post("/v1/completions", prompt=prompts[2]),
            "n=2": lambda: post("/v1/completions", prompt=prompts[3], n=2),
            "chat": lambda: post("/v1/chat/completions", messages=[{"role": "user", "content": "What is 3 + 4?"}]),
            "form": lambda: post("/v1/completions", prompt=prompts[6], structured_outputs={"regex": "[a-z, ]{9999}"}),
            "gRPC stream": lambda: pieces(prompts[4]),
            "gRPC whole": lambda: whole(prompts[5]),
        }
    )
