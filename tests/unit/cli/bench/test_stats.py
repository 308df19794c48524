"""What one reply and one stage measured, and which requests meet the SLO."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.stats.records import INTERRUPTED, RequestRecord
from services.cli.bench.stats.reply import ReplyError, StreamedReply, error_code
from services.cli.bench.stats.slo import ServiceLevel, parse_slo
from services.cli.bench.stats.summary import StageSummary, summarise


def line(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode()


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return line({"choices": [choice]} | more)


def test_a_chat_with_usage() -> None:
    record = RequestRecord(0.9, 1.0)
    reply = StreamedReply(record)
    reply.feed(line({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), 1.1)
    for text, at_s in (("a", 1.5), ("b", 1.7), ("c", 2.0)):
        reply.feed(chunk(text), at_s)
    reply.feed(b": a comment", 2.05)
    reply.feed(chunk(finish="length"), 2.1)
    usage = {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 8}}
    reply.feed(line({"choices": [], "usage": usage}), 2.2)
    reply.feed(b"data: [DONE]", 2.3)
    reply.end(2.4)
    assert reply.text == "abc"
    assert (record.ttft_s, record.e2e_s, record.late_s) == pytest.approx((0.5, 1.1, 0.1))
    assert record.gaps_s == pytest.approx([0.2, 0.3])
    assert record.tpot_s == pytest.approx(0.6 / 6)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens, record.is_counted) == (12, 8, 7, True)
    assert record.finish_reason == "length"


def test_a_completion_without_usage_counts_its_pieces() -> None:
    record = RequestRecord(0, 0)
    reply = StreamedReply(record)
    for i in range(3):
        reply.feed(line({"choices": [{"text": "x", "finish_reason": "stop" if i == 2 else None}]}), i)
    reply.end(9)
    assert (record.output_tokens, record.is_counted, record.prompt_tokens) == (3, False, None)
    assert (record.first_s, record.end_s) == (0, 2)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_output(name: str) -> None:
    record = RequestRecord(0, 0)
    reply = StreamedReply(record)
    reply.feed(line({"choices": [{"delta": {name: ["x"] if name == "tool_calls" else "x"}}]}), 3)
    reply.feed(chunk(finish="stop"), 4)
    reply.end(5)
    assert (record.ttft_s, record.output_tokens, reply.text) == (3, 1, "")


def test_the_ttft_of_a_reply_without_text_is_the_time_until_its_end() -> None:
    record = RequestRecord(0, 0)
    reply = StreamedReply(record)
    reply.feed(chunk(finish="stop"), 4)
    reply.feed(b"data: [DONE]", 5)
    reply.end(6)
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.output_tokens) == (4, 4, None, 0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"data: {", "not JSON"),
        (b"data: [1]", "not an object"),
        (b'data: {"error": {"code": "overloaded"}}', "error in the stream: overloaded"),
    ],
)
def test_a_bad_chunk_fails_with_its_reason(bad: bytes, reason: str) -> None:
    with pytest.raises(ReplyError, match=reason):
        StreamedReply(RequestRecord(0, 0)).feed(bad, 1)


def test_a_stream_that_ends_early_fails() -> None:
    reply = StreamedReply(RequestRecord(0, 0))
    reply.feed(chunk("a"), 1)
    with pytest.raises(ReplyError, match="ended early"):
        reply.end(2)


def test_an_error_code_is_found_in_every_shape_of_error() -> None:
    assert error_code({"error": {"code": "context_length_exceeded", "type": "x"}}) == "context_length_exceeded"
    assert error_code({"error": {"code": 400, "type": "BadRequestError"}}) == "BadRequestError"
    assert error_code({"type": "server_error"}) == "server_error"
    assert error_code({"error": "no"}) == error_code([]) == error_code(None) == ""


records = st.builds(
    lambda sent, ttft, gaps, tokens, error: RequestRecord(
        scheduled_s=sent,
        sent_s=sent,
        first_s=sent + ttft,
        end_s=sent + ttft + sum(gaps),
        gaps_s=gaps,
        prompt_tokens=10,
        output_tokens=tokens,
        is_counted=True,
        error=error,
    ),
    st.floats(0, 100),
    st.floats(0, 10),
    st.lists(st.floats(0, 1), max_size=9),
    st.integers(0, 50),
    st.sampled_from(["", "", "", "HTTP 429", "timeout", INTERRUPTED]),
)
levels = st.builds(
    ServiceLevel, *(st.none() | st.floats(0.001, 10) for _ in range(4)), st.floats(0.01, 1)
).filter(lambda slo: any((slo.ttft_s, slo.itl_s, slo.tpot_s, slo.e2e_s)))  # fmt: skip


@given(found=st.lists(records, max_size=30), slo=st.none() | levels)
def test_a_summary_adds_up(found: list[RequestRecord], slo: ServiceLevel | None) -> None:
    summary = summarise(found, slo)
    assert summary.requests + summary.interrupted == len(found)
    assert summary.succeeded + sum(summary.failures.values()) == summary.requests
    assert summary.good <= summary.succeeded
    assert slo is not None or summary.good == summary.succeeded
    assert summary.output_tokens == sum(record.output_tokens for record in found if not record.error)
    assert summary.goodput_per_s <= summary.requests_per_s
    for distribution in (summary.ttft, summary.itl, summary.tpot, summary.e2e):
        if distribution is not None:
            assert distribution.curve == sorted(distribution.curve)
            order = [distribution.p50, distribution.p90, distribution.p95, distribution.p99, distribution.max]
            assert order == sorted(order)
    assert StageSummary.from_json(json.loads(json.dumps(summary.as_json()))) == summary


def test_rates_count_from_the_first_request_to_the_end_of_the_last() -> None:
    one = RequestRecord(5, 5, 7, 6, [1.0], 10, None, 4, True)
    two = RequestRecord(6, 6, 9, 6.5, [2.5], 20, 16, 2, True)
    failed = RequestRecord(6, 6, 6.1, error="HTTP 429")
    summary = summarise([one, two, failed], parse_slo("ttft=0.7s,share=0.5"))
    assert summary.duration_s == 4
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 1.5, 9)
    assert (summary.good, summary.goodput_per_s) == (1, 0.25)
    assert summary.good_share == pytest.approx(1 / 3)
    assert summary.failed_share == pytest.approx(1 / 3)
    assert summary.failures == {"HTTP 429": 1}
    assert summary.cached_tokens == 16


@pytest.mark.parametrize(
    ("text", "is_met"),
    [("ttft=500ms", True), ("ttft=499ms", False), ("itl=300ms", True), ("itl=290ms", False), ("tpot=101ms", True),
     ("tpot=99ms", False), ("e2e=1100ms", True), ("e2e=1s", False), ("ttft=1s,e2e=1s", False)],
)  # fmt: skip
def test_a_request_meets_an_slo_only_within_each_limit(text: str, is_met: bool) -> None:
    record = RequestRecord(0, 0, 1.1, 0.5, [0.3, 0.3], 1, None, 7, True)
    assert parse_slo(text).is_met_by(record) is is_met
    record.error = "timeout"
    assert not parse_slo(text).is_met_by(record)


@given(slo=levels)
def test_a_printed_slo_reads_back_the_same(slo: ServiceLevel) -> None:
    again = parse_slo(str(slo))
    assert str(again) == str(slo)
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "share"):
        limit = getattr(slo, name)
        assert getattr(again, name) == (limit and pytest.approx(limit, rel=1e-4))


@pytest.mark.parametrize("text", ["", "share=0.9", "ttft", "ttft=fast", "share=0,ttft=1s", "share=2,ttft=1s", "p99=1s"])
def test_bad_slos(text: str) -> None:
    with pytest.raises(ValueError, match=r"SLO|duration|share"):
        parse_slo(text)
