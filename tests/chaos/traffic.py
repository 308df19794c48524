"""Mixed traffic without end: streams, whole answers, samples, chats of several turns, long prompts, cancels."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from tests.chaos.workloads import CHAT, VOCAB, completion, over_grpc
from tests.support.asking import Answer, Break, Gateway, Question, ask
from tests.support.sse import told

TURNS = ("Tell me of a fox.", "And then?", "And where was it?")
TEXT = r"([a-z]+ ){99}"
CANCELLED_SHARE = 0.15


@dataclass(frozen=True)
class Seen:
    """What a client saw of one request, on the loop's clock."""

    name: str
    began_s: float
    ended_s: float
    times: list[float]
    breaks: list[Break]
    is_cancelled: bool
    problem: str

    def longest_pause_s(self, begin_s: float, end_s: float) -> float:
        """The longest time without a message from the server, between these two times."""
        inside = [time for time in (self.began_s, *self.times, self.ended_s) if begin_s < time < end_s]
        times = [max(begin_s, self.began_s), *inside, min(end_s, self.ended_s)]
        return max(after - before for before, after in itertools.pairwise(times))


def _questions(rng: random.Random) -> Iterator[Question]:
    """All requests but the chats, because the later turns of a chat follow from answers."""

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(8, VOCAB) for _ in range(num_tokens)]

    system = prompt(100)  # several prompts begin with it
    for i in range(4):
        yield completion("short", prompt(12), 40)
        yield completion("long", [*system, *prompt(20)], 250)
        yield completion("long prompt", prompt(700), 20)
        yield completion("seeded", [*system, *prompt(9)], 150, temperature=1.0, top_p=0.9, seed=i)
        yield completion("whole", prompt(30), 80, temperature=1.0, seed=i, stream=False)
        yield completion("n=4", [*system, *prompt(5)], 80, temperature=1.0, seed=i, n=4)
        yield completion("scored", "Once there was", 100, temperature=1.0, seed=i, logprobs=2, presence_penalty=0.5)
        yield completion("structured", "One day", 100, temperature=1.0, seed=i, structured_outputs={"regex": TEXT})
        yield completion("stop", "One day", 120, temperature=1.0, seed=i, stop=["no such end", "e no such"])
        yield over_grpc("grpc", token_ids=[*system, *prompt(9)], max_tokens=150, seed=i, logprobs=1)
        yield over_grpc("grpc text", prompt="One day", max_tokens=120, seed=i, stop=["no such end", "e no such"])


class Traffic:
    """Clients that send one request after the other and compare the answers with the undisturbed ones."""

    def __init__(self, gateways: list[Gateway], http: httpx.AsyncClient, seed: int) -> None:
        self.seen: list[Seen] = []
        self._gateways = gateways
        self._http = http
        self._rng = random.Random(seed)
        self._known: list[list[Answer]] = []  # the turns of a chat, or one answer
        self._num_asked = 0
        self._stopping = False
        self._asking = asyncio.Event()
        self._asking.set()
        self._num_open = 0

    @property
    def num_asked(self) -> int:
        return self._num_asked

    async def learn(self) -> None:
        """The answers while nothing happens, a few at a time. AssertionError if one breaks off or is refused."""
        few = asyncio.Semaphore(4)

        async def answers(asking: Coroutine[Any, Any, list[Answer]]) -> list[Answer]:
            async with few:
                return await asking

        async def alone(question: Question) -> list[Answer]:
            return [await self._answer(question)]

        asking = [alone(question) for question in _questions(random.Random(1))] + [self._chat(i) for i in range(4)]
        self._known = await asyncio.gather(*map(answers, asking))
        unfit = [answer for known in self._known for answer in known if answer.breaks or not answer.is_done]
        why = [(answer.question.name, answer.breaks, answer.refusal) for answer in unfit]
        assert not unfit, f"not answered while nothing happens: {why}"

    async def run(self, num_clients: int) -> None:
        """Sends requests until `stop`."""
        await asyncio.gather(*(self._client() for _ in range(num_clients)))

    def stop(self) -> None:
        """Requests that have begun are brought to their end."""
        self._stopping = True
        self.go_on()

    async def pause(self) -> None:
        """Stops all clients until `go_on`. Returns when all have their answers."""
        self._asking.clear()
        while self._num_open:  # noqa: ASYNC110 - a rare wait of some seconds
            await asyncio.sleep(0.05)

    def go_on(self) -> None:
        self._asking.set()

    async def _chat(self, seed: int) -> list[Answer]:
        messages: list[dict[str, str]] = []
        turns = []
        for text in TURNS:
            messages = [*messages, {"role": "user", "content": text}]
            options: dict[str, Any] = {"max_tokens": 60, "seed": seed, "stream": True}
            turns.append(await self._answer(Question("chat", CHAT, {"messages": messages, **options})))
            messages = [*messages, {"role": "assistant", "content": told(turns[-1].events).texts[0]}]
        return turns

    async def _client(self) -> None:
        while not self._stopping:
            for right in self._rng.choice(self._known):
                await self._ask_and_check(right)
                if self._stopping:
                    return

    async def _ask_and_check(self, right: Answer) -> None:
        await self._asking.wait()
        loop = asyncio.get_running_loop()
        question, began_s = right.question, loop.time()
        if question.body["stream"] and self._rng.random() < CANCELLED_SHARE:
            question = replace(question, cancel_after=self._rng.randrange(1, max(2, len(right.events) - 2)))
        answer = await self._answer(question)
        self.seen.append(
            Seen(
                question.name,
                began_s,
                loop.time(),
                answer.times,
                answer.breaks,
                answer.is_cancelled,
                answer.differs(right),
            )
        )

    async def _answer(self, question: Question) -> Answer:
        self._num_asked += 1
        self._num_open += 1
        answer = Answer(question)
        gateways = self._rng.sample(self._gateways, len(self._gateways))
        try:
            await ask(self._http, gateways, f"traffic-{self._num_asked}", answer)
        except (
            Exception
        ) as error:  # a final refusal or an invalid answer: noted as wrong, while the other clients continue
            answer.refusal = repr(error)
        finally:
            self._num_open -= 1
        return answer
