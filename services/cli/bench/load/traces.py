"""Reads traces of requests: those of Mooncake, Azure, Vidur (lengths alone), Dynamo (agent sessions) and ServeGen.

A file may be gzipped (.gz). A .tar.gz or .tgz file is ServeGen's; otherwise the first line shows the format. No trace
has texts. The text of a prompt is generated from its length and from the ids of its blocks, if the trace has them:
equal ids give equal text.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from services.cli.bench.load import servegen
from services.cli.bench.load.sessions import LoadSession, Segment, SessionTurn, TimedSession

Row = dict[str, Any]


class TraceError(ValueError):
    """The file cannot be used as a trace. The message is one line that names the file, and often the line in it."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Sessions in the order of their start."""

    format: str
    sessions: Iterator[TimedSession]
    has_times: bool = True


def read_trace(path: Path, seed: int) -> TraceFile:
    """Raises TraceError."""
    try:
        if path.name.endswith((".tar.gz", ".tgz")):
            return TraceFile("servegen", servegen.read(path, seed))
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            return _read(lines, path)
    except servegen.NotServeGen as error:
        raise TraceError(f"{path}: {error}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def scaled(sessions: Iterator[TimedSession], scale: float, max_tokens: int) -> Iterator[TimedSession]:
    """The sessions with all lengths multiplied by `scale`; a length stays at least 1. Leaves out each session with a
    request that then has more than `max_tokens` (prompt and output; 0: no limit)."""
    for at_s, session in sessions:
        turns = tuple(
            replace(
                turn,
                segments=tuple(Segment(s.key, max(1, round(s.tokens * scale))) for s in turn.segments),
                output_tokens=max(1, round(turn.output_tokens * scale)),
            )
            for turn in session.turns
        )
        if not max_tokens or max(prompt_tokens(turn) + turn.output_tokens for turn in turns) <= max_tokens:
            yield TimedSession(at_s, replace(session, turns=turns))


def from_start(sessions: Iterator[TimedSession], start_s: float) -> Iterator[TimedSession]:
    """From `start_s` on (0: from the first session on), with times that count from there."""
    base = start_s or None
    for at_s, session in sessions:
        if at_s < start_s:
            continue
        if base is None:
            base = at_s
        yield TimedSession(at_s - base, session)


def prompt_tokens(turn: SessionTurn) -> int:
    return sum(segment.tokens for segment in turn.segments)


def _read(lines: TextIO, path: Path) -> TraceFile:
    first = lines.readline()
    rest = itertools.chain([first], lines)
    columns = first.strip().split(",")
    if columns == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        return TraceFile("azure", _azure(csv.DictReader(rest), path))
    if columns[:2] == ["num_prefill_tokens", "num_decode_tokens"]:
        return TraceFile("vidur", _vidur(csv.DictReader(rest), path), has_times=False)
    rows = list(_json_rows(rest, path))
    if rows and "hash_ids" in rows[0]:
        return TraceFile("mooncake", _checked(path, _mooncake, rows))
    if rows and "event" in rows[0]:
        return TraceFile("dynamo", _checked(path, _dynamo, rows))
    raise TraceError(f"{path}: not a trace of Mooncake, Azure, Vidur, Dynamo or ServeGen")


def _json_rows(lines: Iterator[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: expected an object")
        yield row


def _checked(path: Path, parse: Any, rows: list[Row]) -> Iterator[TimedSession]:
    try:
        found: list[TimedSession] = parse(rows)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: a row lacks a field, or has a bad one: {error!r}") from error
    return iter(sorted(found, key=lambda timed: timed.at_s))


def _one(key: str, at_s: float, prompt: int, output: int) -> TimedSession:
    turn = SessionTurn((Segment(key, max(1, prompt)),), max(1, output))
    return TimedSession(at_s, LoadSession((turn,), kind="trace"))


def _csv_rows(reader: csv.DictReader[str], path: Path, parse: Any) -> Iterator[TimedSession]:
    found = []
    for number, row in enumerate(reader):
        try:
            found.append(parse(number, row))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number + 2}: {error}") from error
    return iter(sorted(found, key=lambda timed: timed.at_s))


def _azure(reader: csv.DictReader[str], path: Path) -> Iterator[TimedSession]:
    def parse(number: int, row: dict[str, str]) -> TimedSession:
        # Seven digits of a second: datetime reads six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        seconds = (at - datetime(1970, 1, 1)).total_seconds()
        return _one(f"row{number}", seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))

    return _csv_rows(reader, path, parse)


def _vidur(reader: csv.DictReader[str], path: Path) -> Iterator[TimedSession]:
    def parse(number: int, row: dict[str, str]) -> TimedSession:
        return _one(f"row{number}", 0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))

    return _csv_rows(reader, path, parse)


def _mooncake(rows: list[Row]) -> list[TimedSession]:
    block_tokens = infer_block_tokens([(int(row["input_length"]), len(row["hash_ids"])) for row in rows])
    sessions = []
    for number, row in enumerate(rows):
        segments = block_segments(row["hash_ids"], int(row["input_length"]), block_tokens, f"row{number}")
        turn = SessionTurn(segments, max(1, int(row["output_length"])))
        sessions.append(TimedSession(float(row["timestamp"]) / 1000, LoadSession((turn,), kind="trace")))
    return sessions


def infer_block_tokens(prompts: list[tuple[int, int]]) -> int:
    """The block size of prompts that are given as (tokens, blocks). A partial last block counts (as in Mooncake's
    traces) or does not.

    Raises ValueError if no power of two fits all prompts."""
    for block_tokens in (1 << power for power in range(14)):
        if all(blocks in (tokens // block_tokens, -(-tokens // block_tokens)) for tokens, blocks in prompts):
            return block_tokens
    raise ValueError("hash_ids: no block size fits all prompts")


def block_segments(ids: list[Any], tokens: int, block_tokens: int, rest_key: str) -> tuple[Segment, ...]:
    """A prompt of blocks. Tokens after the last block have a key of their own."""
    segments = []
    for position, block in enumerate(ids):
        rest = tokens - position * block_tokens
        if rest > 0:
            segments.append(Segment(f"block{block}", min(block_tokens, rest)))
    rest = tokens - len(ids) * block_tokens
    if rest > 0 or not segments:
        segments.append(Segment(rest_key, max(1, rest)))
    return tuple(segments)


def _dynamo(rows: list[Row]) -> list[TimedSession]:
    """The requests of each session. The pause before a request is the time since the end of the session's request
    before it: the time that the tools took."""
    ended: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        event = row["event"]
        if event["event_type"] == "request_end":
            ended[event["agent_context"]["session_id"]].append(event["request"])
    sessions = []
    for requests in ended.values():
        requests.sort(key=lambda request: request["request_received_ms"])
        turns, previous_end = [], None
        for request in requests:
            start = request["request_received_ms"]
            pause_s = 0.0 if previous_end is None else max(0.0, (start - previous_end) / 1000)
            shape = request["replay"]
            ids, tokens = shape["input_sequence_hashes"], int(shape["input_length"])
            segments = block_segments(ids, tokens, int(shape["trace_block_size"]), f"row{request['request_id']}")
            turns.append(SessionTurn(segments, max(1, int(request["output_tokens"])), pause_s))
            previous_end = start + request["total_time_ms"]
        at_s = requests[0]["request_received_ms"] / 1000
        # Each prompt of the trace is complete, so the replies are not added to it.
        sessions.append(TimedSession(at_s, LoadSession(tuple(turns), kind="trace", keeps_history=False)))
    return sessions
