"""Log lines carry service, level and request id, also those that other libraries write."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from services.runtime.logs import bind_request_id, configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)
    bind_request_id(None)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_of_paceline_and_of_the_standard_library() -> None:
    stream = io.StringIO()
    configure_logging("cache", "info", "auto", stream=stream)
    bind_request_id("req-1")
    get_logger("a.b").info("block stored", worker=3)
    bind_request_id(None)
    logging.getLogger("uvicorn").warning("port %d is odd", 8001)
    get_logger("a.b").debug("not at this level")
    ours, theirs = lines(stream)
    assert ours["message"] == "block stored"
    assert (ours["service"], ours["level"], ours["worker"], ours["logger"]) == ("cache", "info", 3, "a.b")
    assert ours["request_id"] == "req-1"
    assert ours["timestamp"].endswith("Z")
    assert (theirs["message"], theirs["service"], theirs["level"]) == ("port 8001 is odd", "cache", "warning")
    assert "request_id" not in theirs


def test_an_exception_and_odd_values_stay_on_one_line() -> None:
    stream = io.StringIO()
    configure_logging("cache", "info", "json", stream=stream)
    try:
        raise ValueError("no\nblocks")
    except ValueError:
        get_logger("a").exception("failed", data=b"\xff", where=object(), by={1: 2})
    (line,) = lines(stream)
    assert "ValueError: no" in line["exception"]


def test_human_lines_have_no_colour_in_a_pipe() -> None:
    stream = io.StringIO()
    configure_logging("cache", "INFO", "human", stream=stream)
    get_logger("a").info("worker registered", worker=3)
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    for word in ("info", "worker registered", "worker=3", "cache"):
        assert word in line


def test_a_later_call_replaces_the_earlier_one() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("cache", "info", "json", stream=first)
    log = get_logger("a")
    log.info("one")
    configure_logging("cache", "info", "json", stream=second)
    log.info("two")
    assert [line["message"] for line in lines(first)] == ["one"]
    assert [line["message"] for line in lines(second)] == ["two"]


def test_warnings_are_logged() -> None:
    stream = io.StringIO()
    configure_logging("cache", "info", "json", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", stacklevel=1)
    assert "old thing" in lines(stream)[0]["message"]


@pytest.mark.parametrize(("level", "fmt"), [("info", "xml"), ("loud", "json")])
def test_unknown_level_or_format(level: str, fmt: str) -> None:
    with pytest.raises(ValueError, match=r"xml|LOUD"):
        configure_logging("cache", level, fmt, stream=io.StringIO())


def test_an_odd_text_stays_one_line() -> None:
    """A text with half a character, and a text of megabytes."""
    stream = io.StringIO()
    configure_logging("cache", "info", "json", stream=stream)
    get_logger("a.b").warning("policy failed", error="\ud800 bad", words="x" * 5_000_000)
    [line] = lines(stream)
    assert line["error"] == "\ud800 bad"
    assert len(line["words"]) < 30_000
    assert line["words"].endswith("… (5000000 characters)")


def test_a_log_line_for_a_terminal_is_cut() -> None:
    stream = io.StringIO()
    configure_logging("cache", "info", "human", stream=stream)
    try:
        raise ValueError("x" * 5_000_000)
    except ValueError as error:
        get_logger("a").exception("failed", error=str(error))
    text = stream.getvalue()
    assert "Traceback (most recent call last)" in text
    assert "… (5000000 characters)" in text
    assert len(text) < 60_000
