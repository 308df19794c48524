"""`Answer.differs`, on which the kill matrix and the soak rely, finds wrong answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.asking import Answer, Question
from tests.support.sse import Event

QUESTION = Question("a", "/v1/completions", {"stream": True})
HEAD = {"id": "x", "created": 1, "model": "demo", "object": "text_completion"}


def piece(text: str, reason: str | None = None) -> Event:
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    return Event("1", json.dumps(HEAD | {"choices": [choice]}))


USAGE = Event("2", json.dumps(HEAD | {"choices": [], "usage": {"completion_tokens": 3}}))
DONE = Event("3", "[DONE]")
EVENTS = [piece("once "), piece("there "), piece("was", "length"), USAGE, DONE]


def answer(*events: Event) -> Answer:
    return Answer(QUESTION, events=list(events), is_done=True)


def test_the_same_tokens_in_other_events_are_right() -> None:
    assert not answer(*EVENTS).differs(answer(*EVENTS))
    assert not answer(piece("once there "), *EVENTS[2:]).differs(answer(*EVENTS))


@pytest.mark.parametrize("events", [EVENTS[1:], [EVENTS[0], *EVENTS], [EVENTS[1], EVENTS[0], *EVENTS[2:]], EVENTS[:-1]])
def test_lost_doubled_and_exchanged_tokens_are_found(events: list[Event]) -> None:
    assert answer(*events).differs(answer(*EVENTS))


def test_an_unfinished_answer_is_wrong_and_the_problem_says_why() -> None:
    lost = replace(answer(*EVENTS[:2]), is_done=False, breaks=cast(Any, ["503"]))
    assert lost.differs(answer(*EVENTS)) == "did not end: ['503']"


def test_a_cancelled_answer_must_be_a_beginning_of_the_right_answer() -> None:
    cancelled = [replace(answer(*events), is_done=False, is_cancelled=True) for events in (EVENTS[:2], EVENTS[1:2])]
    assert not cancelled[0].differs(answer(*EVENTS))
    assert cancelled[1].differs(answer(*EVENTS))
