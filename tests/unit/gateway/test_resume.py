"""A stream that breaks after any event and is resumed equals the undisturbed stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo import CHECKPOINT
from services.gateway.engine.logprobs import Echo
from services.gateway.engine.request import GenerateJob, RequestBuilder
from services.gateway.engine.request_store import read_once
from services.gateway.engine.scores import Score
from services.gateway.errors import ApiError
from services.gateway.openai.answers import StreamAnswer
from services.gateway.openai.event_ids import EventId, parse_event_id
from services.gateway.openai.format import Envelope, Kind
from services.gateway.text.model_files import read_model_files
from services.gateway.text.tokenizer import TextTokenizer
from tests.support.fake_session import LENGTH, STOP, UNSPECIFIED, FakeSession
from tests.support.sse import Event, parse_events, told
from tests.unit.gateway.test_request import make_job

BUILDER = RequestBuilder(TextTokenizer.from_folder(CHECKPOINT), read_model_files(CHECKPOINT), max_model_len=100)
EOS = min(BUILDER.eos_token_ids)
PROMPT = [7, 8]
WORDS = BUILDER.encode_word("one two öäü three 😀 four")


@dataclass
class Case:
    """What a request asks for and gets: `outputs` are the tokens of its choices."""

    kind: Kind
    outputs: list[list[int]]
    choices: dict[str, Any]
    usage: bool = False
    continuous_usage: bool = False
    echo: str | None = None  # then the choices are samples of one prompt
    only_echo: bool = False

    def jobs(self) -> list[GenerateJob]:
        jobs = [make_job(BUILDER, ids=PROMPT, **self.choices) for _ in self.outputs]
        if self.echo is not None:
            for i, job in enumerate(jobs):
                job.echo, job.sample = Echo(self.echo, (), self.only_echo), i
        return jobs


async def stream(case: Case, batches: Iterator[int], after: EventId | None = None) -> tuple[int, list[Event]]:
    """The status and events of an answer. Its tokens arrive in batches of these sizes."""
    session = FakeSession()
    envelope = Envelope(case.kind, "m", 5 if after is None else after.created_s, "0" * 32)
    answer = StreamAnswer(
        read_once(session.run(case.jobs())),
        envelope,
        include_usage=case.usage,
        continuous_usage=case.continuous_usage,
        after=after,
        event_ids=True,
    )
    sent: list[Any] = []

    async def send(message: Any) -> None:
        for _ in range(next(batches) % 3):  # a connection that takes no more for a while
            await asyncio.sleep(0)
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    task = asyncio.create_task(answer({"type": "http", "state": {}}, receive, send))
    left = [list(output) for output in case.outputs]
    while any(request.ending is None for request in session.live):
        index = next(batches) % len(left)
        request, count = session.live[index], next(batches) % 4
        batch, left[index] = left[index][:count], left[index][count:]
        if index == 0:  # only the first sample asks for prompt scores
            request.prompt_scores = {1: Score(-0.5, ((3, -0.25),))}
        request.scores += [Score(-token / 8, ((token, 0.0), (9, -1.0))) for token in batch]
        session.give(request, *batch)
        for _ in range(next(batches) % 4):
            await asyncio.sleep(0)
        if not left[index]:
            session.end(request, STOP if case.outputs[index][-1] in request.final_tokens else LENGTH)
    async with asyncio.timeout(20):
        await task
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], list(parse_events(body.decode().splitlines()))


def run(case: Case, seed: int, after: EventId | None = None) -> list[Event]:
    status, events = asyncio.run(stream(case, numbers(seed), after))
    assert status == 200
    return events


def numbers(seed: int) -> Iterator[int]:
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 40


def place(case: Case, event: Event) -> EventId:
    return parse_event_id(event.id, [job.sampling.max_tokens for job in case.jobs()], has_usage=case.usage)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    token = st.one_of(st.integers(0, 999), st.sampled_from(WORDS)).filter(lambda t: t not in BUILDER.eos_token_ids)
    ends = st.sampled_from([[], [EOS]])
    outputs = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=3))
    choices: dict[str, Any] = {}
    if draw(st.booleans()):
        choices["stop"] = draw(
            st.lists(st.sampled_from(["two", "o th", " three 😀", "e", "no such text"]), min_size=1, max_size=3)
        )
        choices["min_tokens"] = draw(st.integers(0, 3))
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        choices[name] = draw(st.booleans())
    if draw(st.booleans()):
        choices["logprobs"] = 2
    kind: Kind = draw(st.sampled_from(["chat", "completion"]))
    outputs = [output + draw(ends) for output in outputs]
    case = Case(kind, outputs, choices, draw(st.booleans()), draw(st.booleans()))
    if kind == "completion":
        case.echo, case.only_echo = draw(st.sampled_from([None, "", "Öne two"])), draw(st.booleans())
    return case


@settings(max_examples=120, deadline=None)
@given(cases(), st.data())
def test_a_stream_may_break_behind_any_event(case: Case, data: st.DataObject) -> None:
    seeds = st.integers(0, 2**32)
    undisturbed = run(case, data.draw(seeds))
    assert all(event.id for event in undisturbed)
    got: list[Event] = []
    rest = run(case, data.draw(seeds))
    for _ in range(2):
        # Behind [DONE] nothing is left to ask for.
        cut = data.draw(st.integers(0, len(rest) - 1))
        got, rest = got + rest[:cut], rest[cut:]
        if got:
            rest = run(case, data.draw(seeds), place(case, got[-1]))
    assert told(got + rest) == told(undisturbed)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_an_echo_has_its_scores_after_the_first_sample_was_delivered(tokens: int) -> None:
    """The client has `tokens` of the first sample and none of the second, which echoes the same prompt scores."""
    case = Case("completion", [[50, 60], [51, 61]], {"logprobs": 1}, echo="öne")
    runs = (run(case, seed) for seed in range(200))
    found = (
        (events, i)
        for events in runs
        for i, event in enumerate(events)
        if [p.tokens for p in place(case, event).positions] == [tokens, None]
    )
    events, i = next(found)
    after = place(case, events[i])
    assert after.positions[0].ended == (tokens == 2)
    for seed in range(20):
        assert told(events[: i + 1] + run(case, seed, after)) == told(events)


def test_a_resumed_stream_fails_if_its_tokens_differ_from_the_delivered_ones() -> None:
    """If the tokens differ, as after a near tie, the client gets an error and not the rest of another answer."""
    case = Case("completion", [[50, 60, 70, 80], [51, 61, 71, 81]], {})
    other = Case("completion", [[50, 65, 70, 80], [51, 61, 71, 81]], {})
    events = run(case, 1)
    behind = [event for event in events if place(case, event).positions[0].tokens in (2, 3, 4)]
    assert behind
    for event in behind[:-1]:
        status, [error] = asyncio.run(stream(other, numbers(3), place(case, event)))
        assert status == 400
        assert json.loads(error.data)["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize("places", ["5", "4", "9e", "2e"])
def test_an_event_id_behind_the_end_of_the_answer_is_refused(places: str) -> None:
    """The answer ends early by a stop string or an end token, which the event id does not contain."""
    case = Case("completion", [[*BUILDER.encode_word("one"), *BUILDER.encode_word(" two"), 50, 60]], {"stop": ["one"]})
    after = parse_event_id(f"5.00000000.{places}", [50], has_usage=False)
    status, [error] = asyncio.run(stream(case, numbers(1), after))
    assert (status, json.loads(error.data)["error"]["reason"]) == (400, "cannot_resume")


async def test_a_failure_while_catching_up_is_the_answer() -> None:
    session = FakeSession()
    [run_] = session.run([make_job(BUILDER)])
    reading = read_once([run_])
    session.end(run_.live, UNSPECIFIED, code=8)
    with pytest.raises(ApiError) as failed:
        await reading.generations[0].skip(4)
    assert failed.value.status == 429
