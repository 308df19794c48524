"""What `paceline bench` sends and when: arrivals, workloads, the ramp, prompts, values of flags."""

from __future__ import annotations

import itertools
import math
from random import Random
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.load.arrivals import OfferedLoad, constant, poisson, start_times
from services.cli.bench.load.prompts import NO_REPLY, Calibration, PromptWriter
from services.cli.bench.load.ramp import RampSearch
from services.cli.bench.load.ranges import (
    SecondsRange,
    TokenRange,
    parse_count,
    parse_seconds,
    parse_seconds_range,
    parse_tokens,
)
from services.cli.bench.load.sessions import LoadSession, Segment, SessionTurn
from services.cli.bench.load.workloads import KINDS, WorkloadSettings, parse_mix, synthetic_sessions


def test_a_fixed_rate_has_equal_gaps() -> None:
    assert list(itertools.islice(constant(4), 5)) == [0, 0.25, 0.5, 0.75, 1]


def test_poisson_gaps_are_exponential() -> None:
    times = list(itertools.islice(poisson(5, Random(1)), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) >= 0
    # The standard deviation of exponential gaps equals their mean; 20,000 gaps estimate both within 2 %.
    assert mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert stdev(gaps) == pytest.approx(0.2, rel=0.05)


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["rate", "poisson"]), rate=st.floats(0.01, 1000))
def test_a_seed_makes_the_same_arrivals(seed: int, kind: str, rate: float) -> None:
    load = OfferedLoad(kind, rate)  # type: ignore[arg-type]
    first, second = (list(itertools.islice(start_times(load, Random(seed)), 20)) for _ in range(2))
    assert first == second == sorted(first)


@given(
    first=st.floats(0.1, 100),
    factor=st.floats(1, 500),
    precision=st.floats(0.01, 0.5),
    threshold=st.floats(0.01, 100_000),
)
def test_the_ramp_encloses_the_highest_rate_that_holds(
    first: float, factor: float, precision: float, threshold: float
) -> None:
    search = RampSearch(first, first * factor, precision)
    measured = 0
    while (rate := search.next_rate()) is not None:
        search.note(rate, rate <= threshold)
        measured += 1
        assert measured < 40
    if threshold < first / 8:
        assert search.holds is None
    elif threshold >= first * factor:
        assert search.breaks is None
        assert search.holds == pytest.approx(first * factor)
    elif search.holds is not None:
        assert search.breaks is not None
        assert search.holds <= threshold < search.breaks
        assert search.breaks <= search.holds * (1 + precision) * 1.0001


def test_the_ramp_doubles_and_then_bisects() -> None:
    search, rates = RampSearch(1, 64, 0.1), []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.note(rate, rate < 6)
    assert rates[:4] == [1, 2, 4, 8]
    assert rates[4] == pytest.approx(math.sqrt(32))
    assert search.holds is not None
    assert 5.4 < search.holds < 6
    assert (search.stage_s(2, 5), search.stage_s(20, 5)) == (10, 5)


@given(seed=st.integers(0, 2**32), kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1))
def test_a_seed_makes_the_same_sessions_and_no_prompt_twice(seed: int, kinds: set[str]) -> None:
    settings = WorkloadSettings(mix=dict.fromkeys(sorted(kinds), 1.0), input_tokens=TokenRange(5, 90))
    first, second = (list(itertools.islice(synthetic_sessions(settings, seed), 12)) for _ in range(2))
    assert first == second
    assert {session.kind for session in first} <= kinds
    keys = [segment.key for session in first for turn in session.turns for segment in turn.segments]
    assert len(set(keys)) == len(keys)
    assert all(session.turns[0].pause_s == 0 for session in first)
    assert all(5 <= session.turns[0].segments[0].tokens <= 90 for session in first)


def test_sessions_of_an_agent_share_prefixes_and_wait_for_tools() -> None:
    settings = WorkloadSettings(
        mix={"agent": 1.0},
        prefixes=2,
        turns=TokenRange(2, 2),
        tool_calls=TokenRange(3, 3),
        tool_tokens=TokenRange(7, 7),
        tool_s=SecondsRange(0.5, 0.5),
        think_s=SecondsRange(9, 9),
    )
    sessions = list(itertools.islice(synthetic_sessions(settings, 0), 30))
    assert {session.system for session in sessions} == {(Segment("prefix0", 512),), (Segment("prefix1", 512),)}
    for session in sessions:
        assert [turn.pause_s for turn in session.turns] == [0, 0.5, 0.5, 0.5, 9, 0.5, 0.5, 0.5]
        assert [turn.segments[0].tokens for turn in session.turns] == [128, 7, 7, 7] * 2


def test_a_mix_draws_by_weight() -> None:
    settings = WorkloadSettings(mix=parse_mix("random=3,multi-turn"))
    kinds = [session.kind for session in itertools.islice(synthetic_sessions(settings, 5), 4000)]
    assert kinds.count("random") / len(kinds) == pytest.approx(0.75, abs=0.03)


@given(tokens=st.integers(20, 3000), per_word=st.floats(0.5, 5), seed=st.integers(0, 99))
def test_a_prompt_has_about_as_many_tokens_as_wanted(tokens: int, per_word: float, seed: int) -> None:
    writer = PromptWriter(seed, "completion", Calibration(per_word))
    session = LoadSession((SessionTurn((Segment("a", tokens),), 1),))
    prompt = writer.body(session, 0, [])["prompt"]
    assert len(prompt.split()) * per_word == pytest.approx(tokens, abs=per_word)
    assert prompt == PromptWriter(seed, "completion", Calibration(per_word)).body(session, 0, [])["prompt"]


def test_the_tokens_of_the_template_are_subtracted_from_the_first_message() -> None:
    calibration = Calibration.of((16, 36), (144, 164))
    assert calibration == Calibration(1.0, 20.0)
    writer = PromptWriter(0, "chat", calibration)
    (message,) = writer.body(LoadSession((SessionTurn((Segment("a", 100),), 1),)), 0, [])["messages"]
    assert len(message["content"].split()) == 80


@pytest.mark.parametrize("counts", [((16, 20), (144, 20)), ((16, 20), (144, 9)), ((16, 1), (144, 90_000))])
def test_counts_that_make_no_sense_are_refused(counts: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="count as"):
        Calibration.of(*counts)


def test_a_chat_goes_on_with_the_replies() -> None:
    turns = tuple(SessionTurn((Segment(f"t{i}", 4),), 1) for i in range(3))
    writer = PromptWriter(0, "chat", Calibration(1.0))
    session = LoadSession(turns, (Segment("system", 9),))
    first = writer.body(session, 0, [])["messages"]
    third = writer.body(session, 2, ["hello", ""])["messages"]
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third[:2] == first
    assert (third[2]["content"], third[4]["content"]) == ("hello", NO_REPLY)
    alone = LoadSession(turns, keeps_history=False)
    assert len(writer.body(alone, 2, ["hello", ""])["messages"]) == 1


def test_shared_segments_have_the_same_text_in_front() -> None:
    writer = PromptWriter(3, "completion", Calibration(1.0, 6.0))
    prompts = []
    for end in ("x", "y"):
        session = LoadSession((SessionTurn((Segment("block1", 16), Segment("block2", 16), Segment(end, 9)), 1),))
        prompts.append(writer.body(session, 0, [])["prompt"].split())
    assert prompts[0][:32] == prompts[1][:32]
    assert prompts[0][32:] != prompts[1][32:]


def test_token_ids_stay_within_the_vocabulary() -> None:
    writer = PromptWriter(3, "completion", Calibration(), vocabulary=300)
    session = LoadSession((SessionTurn((Segment("a", 500),), 1),), (Segment("system", 20),))
    ids = writer.body(session, 0, [])["prompt"]
    assert len(ids) == 520
    assert 150 <= min(ids) <= max(ids) < 300


def test_values_of_flags() -> None:
    assert parse_tokens("64-512") == TokenRange(64, 512)
    assert parse_tokens("7") == TokenRange(7, 7)
    assert parse_count("0") == TokenRange(0, 0)
    assert [parse_seconds(text) for text in ("200ms", "2s", "1.5m", "3", "1h")] == [0.2, 2, 90, 3, 3600]
    assert parse_seconds_range("1s-5s") == SecondsRange(1, 5)
    assert [str(TokenRange(1, 2)), str(SecondsRange(1, 1.5))] == ["1-2", "1s-1.5s"]


@pytest.mark.parametrize("text", ["", "0", "-3", "5-2", "1.5", "9-", "x", "99999999999"])
def test_bad_numbers_of_tokens(text: str) -> None:
    if text == "9-":
        assert parse_tokens(text) == TokenRange(9, 9)
        return
    with pytest.raises(ValueError, match="expected"):
        parse_tokens(text)


@pytest.mark.parametrize("text", ["", "s", "-1s", "5d", "1s-", "nan", "inf"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["", "chat", "agent=0", "agent=x", "agent=nan", "agent,bogus"])
def test_bad_mixes(text: str) -> None:
    with pytest.raises(ValueError, match=r"workload|weight"):
        parse_mix(text)
