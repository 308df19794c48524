"""A long wait shows a line on a terminal, and nothing in a pipe."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from services.cli import waiting as module
from services.cli.waiting import waiting


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, wait_s: float) -> str:
    monkeypatch.setattr(module, "QUIET_S", 0.1)
    out = io.StringIO()
    with waiting(Console(file=out, force_terminal=terminal, width=80), "reading [a] file"):
        time.sleep(wait_s)
    return out.getvalue()


def test_a_wait_is_shown_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=True, wait_s=0.0) == ""
    text = shown(monkeypatch, terminal=True, wait_s=0.4)
    assert "reading [a] file" in text
    assert text.endswith("\x1b[2K"), "the line is erased at the end"


def test_a_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False, wait_s=0.2) == ""
