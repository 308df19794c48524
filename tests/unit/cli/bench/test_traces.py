"""Each format of a trace, with lengths, times and shared blocks as in the file."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.load.sessions import LoadSession, Segment, SessionTurn, TimedSession
from services.cli.bench.load.traces import (
    TraceError,
    block_segments,
    from_start,
    infer_block_tokens,
    prompt_tokens,
    read_trace,
    scaled,
)

MOONCAKE = [
    {"timestamp": 1500, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 1200, "output_length": 30, "hash_ids": [1, 3, 4]},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path / "trace.jsonl", MOONCAKE), 0)
    first, second = trace.sessions
    assert (trace.format, first.at_s, second.at_s) == ("mooncake", 0.5, 1.5)
    (turn,) = first.session.turns
    assert turn.segments == (Segment("block1", 512), Segment("block3", 512), Segment("block4", 176))
    assert turn.output_tokens == 30
    assert second.session.turns[0].segments[0] == turn.segments[0]


def test_azure_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0,110,27\n"
    )
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(path, 0)
    first, second = from_start(trace.sessions, 0)
    assert (trace.format, first.at_s) == ("azure", 0)
    assert second.at_s == pytest.approx(1.02004)
    assert prompt_tokens(first.session.turns[0]) == 4808
    assert second.session.turns[0].output_tokens == 27


def test_vidur_has_no_times(tmp_path: Path) -> None:
    path = tmp_path / "vidur.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n")
    trace = read_trace(path, 0)
    assert not trace.has_times
    assert [prompt_tokens(timed.session.turns[0]) for timed in trace.sessions] == [3772]


def dynamo(session: str, at_ms: int, took_ms: float, tokens: int, hashes: list[int]) -> dict[str, Any]:
    request = {
        "request_id": f"{session}{at_ms}",
        "request_received_ms": at_ms,
        "total_time_ms": took_ms,
        "output_tokens": 5,
        "replay": {"trace_block_size": 16, "input_length": tokens, "input_sequence_hashes": hashes},
    }
    return {"event": {"event_type": "request_end", "agent_context": {"session_id": session}, "request": request}}


def test_dynamo_sessions_pause_as_long_as_their_tools(tmp_path: Path) -> None:
    rows = [
        dynamo("b", 9000, 100, 10, [7]),
        dynamo("a", 1000, 500, 20, [7, 8]),
        {"event": {"event_type": "tool_start"}},
        dynamo("a", 4000, 100, 40, [7, 8, 9]),
    ]
    first, second = read_trace(lines(tmp_path / "agents.jsonl", rows), 0).sessions
    assert (first.at_s, second.at_s) == (1, 9)
    assert [turn.pause_s for turn in first.session.turns] == [0, 2.5]
    assert [prompt_tokens(turn) for turn in first.session.turns] == [20, 40]
    assert not first.session.keeps_history


def servegen(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"data/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


SERVEGEN = {
    "chunk-0-trace.csv": "0,2,1,Gamma,1.0,0.5\n600,0,0,,0,0\n1200,2,1,Weibull,1.0,0.5\n",
    "chunk-0-dataset.json": json.dumps(
        {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"}}
    ),
    "chunk-1-trace.csv": "0,1,1,Gamma,1.0,1.0\n600,0,0,,0,0\n",
    "chunk-1-dataset.json": json.dumps({"0": {"input_tokens": "{99: 1.0}", "output_tokens": "{3: 1.0}"}}),
}


def test_servegen_draws_from_its_description(tmp_path: Path) -> None:
    path = servegen(tmp_path / "servegen.tar.gz", SERVEGEN)
    sessions = list(read_trace(path, 4).sessions)
    times = [timed.at_s for timed in sessions]
    assert times == sorted(times)
    # 2/s and 1/s for 600 s, a pause, and 2/s again: 3,000 requests, give or take four deviations.
    assert len(sessions) == pytest.approx(3000, abs=220)
    assert not [at for at in times if 600 <= at < 1200]
    shapes = {(prompt_tokens(t.session.turns[0]), t.session.turns[0].output_tokens) for t in sessions}
    assert shapes == {(10, 7), (20, 7), (99, 3)}
    assert list(itertools.islice(read_trace(path, 4).sessions, 50)) == sessions[:50]
    assert list(itertools.islice(read_trace(path, 5).sessions, 50)) != sessions[:50]


def test_the_last_window_of_servegen_is_as_long_as_the_first(tmp_path: Path) -> None:
    windows = "6000,2,1,Gamma,1.0,0.5\n6600,2,1,Gamma,1.0,0.5\n"
    files = {"chunk-0-trace.csv": windows, "chunk-0-dataset.json": SERVEGEN["chunk-0-dataset.json"]}
    times = [timed.at_s for timed in read_trace(servegen(tmp_path / "x.tar.gz", files), 0).sessions]
    assert 7100 < max(times) < 7200


def test_a_trace_can_be_scaled_and_cut(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace.jsonl", MOONCAKE)
    first, second = scaled(read_trace(path, 0).sessions, 0.1, 0)
    assert [prompt_tokens(timed.session.turns[0]) for timed in (first, second)] == [51 + 51 + 18, 51 + 49]
    assert first.session.turns[0].output_tokens == 3
    assert [timed.at_s for timed in scaled(read_trace(path, 0).sessions, 1, 1010)] == [1.5]
    assert [timed.at_s for timed in from_start(read_trace(path, 0).sessions, 1)] == [0.5]
    assert [timed.at_s for timed in from_start(read_trace(path, 0).sessions, 0)] == [0, 1]


@given(times=st.lists(st.floats(0, 1000), min_size=1).map(sorted))
def test_a_trace_starts_at_its_first_session(times: list[float]) -> None:
    session = LoadSession((SessionTurn((Segment("a", 1),), 1),))
    found = [timed.at_s for timed in from_start((TimedSession(at_s, session) for at_s in times), 0)]
    assert found == [at_s - times[0] for at_s in times]


@given(power=st.integers(3, 9), tokens=st.lists(st.integers(4000, 9000), min_size=1), is_ceil=st.booleans())
def test_the_block_size_follows_from_the_lengths(power: int, tokens: list[int], is_ceil: bool) -> None:
    size = 1 << power
    prompts = [(n, -(-n // size) if is_ceil else n // size) for n in tokens]
    assert infer_block_tokens(prompts) == size


@given(tokens=st.integers(1, 5000), size=st.sampled_from([16, 512]), is_ceil=st.booleans())
def test_blocks_have_all_tokens_of_the_prompt(tokens: int, size: int, is_ceil: bool) -> None:
    ids = list(range(-(-tokens // size) if is_ceil else tokens // size))
    assert sum(segment.tokens for segment in block_segments(ids, tokens, size, "rest")) == tokens


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", '{"a": 1}\n', "[1]\n", '{"hash_ids": [1]}\n', '{"event": {"event_type": "request_end"}}\n',
     '{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1,2,3,4,5]}\n',
     "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n",
     "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16\n"],
)  # fmt: skip
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"other\.txt"):
        read_trace(path, 0)


@pytest.mark.parametrize("name", ["no.jsonl", "no.jsonl.gz", "no.tar.gz"])
def test_a_missing_or_broken_archive_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / name, 0)
    (tmp_path / name).write_bytes(b"\x00\x01")
    with pytest.raises(TraceError, match="no"):
        read_trace(tmp_path / name, 0)


def test_an_archive_without_a_dataset_is_refused(tmp_path: Path) -> None:
    files = {"chunk-0-trace.csv": SERVEGEN["chunk-0-trace.csv"]}
    with pytest.raises(TraceError, match=r"chunk-0: KeyError\('dataset.json'\)"):
        read_trace(servegen(tmp_path / "x.tar.gz", files), 0)
    with pytest.raises(TraceError, match="no chunk"):
        read_trace(servegen(tmp_path / "x.tar.gz", {"readme": "x"}), 0)
