"""Output for a late reader goes in messages of a bounded size, in order and complete."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1.common_pb2 import FINISH_REASON_LENGTH
from paceline.v1.inference_pb2 import Embedding, SessionResponse
from paceline.v1.worker_pb2 import TokenLogprobs
from scheduler_svc.core.output import sessions
from scheduler_svc.core.output.sessions import MAX_SCORES, MAX_STEPS, Publisher, Session
from services.runtime.rpc import MAX_MESSAGE_BYTES

WINDOW = 3


class Reader:
    """Reads as a gateway does: tokens with their scores, and nothing after an ending."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.scores: dict[int, list[float]] = defaultdict(list)
        self.ended: set[int] = set()
        self.handles: list[int] = []

    def take(self, message: SessionResponse) -> None:
        if message.handles:
            self.handles = list(message.handles)
        handles = self.handles if message.handles or message.same_handles else []
        for handle, token in zip(handles, np.frombuffer(message.token_ids, np.int32).tolist(), strict=True):
            assert handle not in self.ended
            self.tokens[handle].append(token)
        for score in message.scores:
            self.scores[score.handle].append(score.logprob)
            assert len(self.scores[score.handle]) <= len(self.tokens[score.handle])
        for handle, asked in self.scores.items():
            assert len(asked) == len(self.tokens[handle]), "a token without its score"
        self.ended |= {ending.handle for ending in message.endings}


@given(
    steps=st.lists(
        st.tuples(
            st.sets(st.integers(1, 9), min_size=1, max_size=6),  # the handles that get a token
            st.booleans(),  # whether one of these requests ends with the token
            st.integers(0, 2),  # messages that the reader takes then
        ),
        max_size=60,
    ),
    limits=st.tuples(st.integers(1, 12), st.integers(1, 6)),
)
@settings(max_examples=200, deadline=None)
def test_a_late_reader_gets_all_output(steps: list[tuple[set[int], bool, int]], limits: tuple[int, int]) -> None:
    """Requests with an even handle want log probabilities."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "MAX_SCORES", limits[0])
        patch.setattr(sessions, "MAX_STEPS", limits[1])
        session, reader = Session("s", 1, WINDOW), Reader()
        tokens: dict[int, list[int]] = defaultdict(list)
        ended: set[int] = set()
        number = 0
        rows = np.zeros(0, np.int64)
        for wanted, ends, reads in steps:
            handles = sorted(wanted - ended)
            if not handles:
                continue
            values = list(range(number, number + len(handles)))
            number += len(handles)
            if rows.tolist() != handles:  # a worker hands over the same array as long as its rows stay the same
                rows = np.array(handles)
            session.add_tokens(rows, np.array(values, np.int32))
            for handle, value in zip(handles, values, strict=True):
                tokens[handle].append(value)
                if handle % 2 == 0:
                    session.add_score(handle, TokenLogprobs(logprob=float(value)))
            if ends:
                ending = session.add_ending()
                ending.handle, ending.reason = handles[0], FINISH_REASON_LENGTH
                ended.add(handles[0])
            for _ in range(reads):
                if (message := session.next_message()) is not None:
                    assert len(message.scores) <= limits[0] + 6
                    reader.take(message)
                    session.read += 1
        while (message := session.next_message()) is not None:
            reader.take(message)
            session.read += 1
        assert reader.tokens == tokens
        assert reader.ended == ended
        assert reader.scores == {h: [float(v) for v in values] for h, values in tokens.items() if h % 2 == 0}


@pytest.mark.parametrize("gathered", [1, 2, MAX_STEPS, MAX_STEPS + 1, MAX_STEPS + 2, 2 * MAX_STEPS + 1])
def test_handles_are_named_again_after_a_message_of_many_steps(gathered: int) -> None:
    """`same_handles` refers to the handles of the last message. A message of many steps has other handles than its last
    step."""
    session, reader = Session("s", 1, window=1), Reader()
    handles = np.array([1, 2])
    session.add_tokens(handles, np.array([0, 1], np.int32))
    first = session.next_message()
    assert first is not None
    reader.take(first)
    for step in range(1, gathered + 1):
        session.add_tokens(handles, np.array([2 * step, 2 * step + 1], np.int32))
    session.read += 1
    while (message := session.next_message()) is not None:
        reader.take(message)
        session.read += 1
    assert reader.tokens == {1: list(range(0, 2 * gathered + 1, 2)), 2: list(range(1, 2 * gathered + 2, 2))}


def test_the_largest_messages_can_be_sent() -> None:
    """2,000 streams with 20 log probabilities each, and a reader that was away for 300 steps."""
    session = Session("s", 1, WINDOW)
    handles = np.arange(1, 2001)
    best = TokenLogprobs(logprob=-1.0, top_token_ids=bytes(80), top_logprobs=bytes(80))
    for _ in range(300):
        session.add_tokens(handles, np.arange(2000, dtype=np.int32))
        for handle in range(1, 2001, 10):  # one in ten, for the test's time
            session.add_score(handle, best)
    count = 0
    while (message := session.next_message()) is not None:
        session.read += 1
        count += len(message.handles)
        assert message.ByteSize() < MAX_MESSAGE_BYTES / 2
    assert count == 300 * 2000
    assert MAX_SCORES * 200 + MAX_STEPS * 4096 * 8 < MAX_MESSAGE_BYTES


def test_tokens_of_one_session_are_not_sorted_by_session() -> None:
    """The first argument is the index of the only session, so the second argument may be empty."""
    publisher = Publisher({})
    session = publisher.open("s", 8)
    publisher.tokens(session.index, np.zeros(0, np.int64), np.array([7]), np.array([70], np.int32))
    message = session.next_message()
    assert message is not None
    assert (list(message.handles), np.frombuffer(message.token_ids, np.int32).tolist()) == ([7], [70])


def test_large_items_that_fill_a_message_exactly_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    session, vector = Session("s", 1, WINDOW), bytes(100)
    for handle in (1, 2, 3):
        session.add_embedding(handle, vector)
    monkeypatch.setattr(sessions, "MAX_SCORE_BYTES", 2 * Embedding(handle=1, values=vector).ByteSize())
    messages = [session.next_message() for _ in range(2)]
    assert [[one.handle for one in message.embeddings] for message in messages if message] == [[1, 2], [3]]


def test_a_step_of_the_same_rows_does_not_name_its_handles_again() -> None:
    session, handles = Session("s", 1, WINDOW), np.array([1, 2])
    messages = []
    for step in range(2):
        session.add_tokens(handles, np.array([step, step], np.int32))
        messages.append(session.next_message())
    assert [(list(one.handles), one.same_handles) for one in messages if one] == [([1, 2], False), ([], True)]
