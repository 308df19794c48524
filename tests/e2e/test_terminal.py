"""`up`, `chat` and `doctor` in a pseudo-terminal, with real services."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.support.ports import free_port
from tests.support.stack import Stack

# Python 3.12 warns of pexpect's fork; the child calls nothing but exec.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

COMMAND = ["-m", "services.cli"]
MEASURED = r"(\d+) tokens, [\d.]+ tokens/s, TTFT [\d.]+ s, (\d+) of (\d+) prompt tokens cached"
PROMPT = "\n> "


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def spawn(environment: dict[str, str]) -> Iterator[Any]:
    """Starts the command in a pseudo-terminal of 40 lines and 200 columns."""
    started = []

    def start(*argv: str) -> Any:
        child = pexpect.spawn(
            sys.executable, [*COMMAND, *argv], env=environment, encoding="utf-8", timeout=60, dimensions=(40, 200)
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def ask(child: Any, line: str) -> str:
    """What the chat writes for a line, up to the next prompt."""
    child.sendline(line)
    child.expect_exact(PROMPT)
    return str(child.before).replace("\r", "")


def test_a_chat_keeps_its_history_and_stops_an_answer(stack: Stack, spawn: Any) -> None:
    chat = spawn("chat", "--url", stack.url, "--temperature", "0")
    chat.expect_exact(PROMPT)
    assert f"paceline-demo at {stack.url}" in chat.before
    first = ask(chat, "What is 3 + 4?")
    assert "3 + 4 = 7.\n" in first
    second = ask(chat, "What is 5 + 6?")
    assert "5 + 6 = 11.\n" in second
    before, after = (re.search(MEASURED, told) for told in (first, second))
    assert before is not None
    assert after is not None
    assert int(after[2]) >= int(before[3]), f"the second prompt begins with the first, and was computed again: {second}"
    worker = stack.processes["worker-1"]
    worker.send_signal(signal.SIGSTOP)  # otherwise the answer could end before Ctrl-C
    try:
        chat.sendline("Tell me a story")
        chat.expect_exact("first token")  # while the chat still reads a line, Ctrl-C stops no answer
        chat.sendintr()
        chat.expect_exact("stopped")
        chat.expect_exact(PROMPT)
    finally:
        worker.send_signal(signal.SIGCONT)
    assert "TTFT" in ask(chat, "What is 1 + 1?")
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.wait()
    assert chat.exitstatus == 0


def test_a_full_context_is_an_error_without_a_traceback_and_the_chat_goes_on(stack: Stack, spawn: Any) -> None:
    chat = spawn("chat", "--url", stack.url, "--temperature", "0")
    chat.expect_exact(PROMPT)
    refused = ask(chat, "word " * 700)  # a terminal's line has at most 4,095 bytes
    refused = refused if "context" in refused else ask(chat, "word " * 700)
    assert "context" in refused
    assert "Traceback" not in refused
    ask(chat, "/reset")
    assert "3 + 4 = 7.\n" in ask(chat, "What is 3 + 4?")


def test_without_a_terminal_chat_writes_only_the_answer(stack: Stack, environment: dict[str, str]) -> None:
    command = [sys.executable, *COMMAND, "chat", "--url", stack.url, "--temperature", "0"]
    done = subprocess.run(
        command, input="What is 3 + 4?\n", env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 + 4 = 7.\n", "")


def test_up_says_how_to_use_it_serves_a_chat_and_stops_on_ctrl_c(spawn: Any, environment: dict[str, str]) -> None:
    port = free_port()
    ports = [word for name in ("grpc", "scheduler", "cache", "metrics") for word in (f"--{name}-port", "0")]
    up = spawn("up", "--port", str(port), *ports, "--threads", "1")
    up.expect(r"starting .*worker-1 \(\d+ s\)")
    up.expect_exact("Paceline serves paceline-demo")
    up.expect_exact(f"http://127.0.0.1:{port}/v1")
    up.expect_exact(f"curl http://127.0.0.1:{port}/v1/chat/completions")
    up.expect_exact("Or talk to it: ")
    up.expect_exact("paceline chat")
    up.expect_exact("Ctrl-C drains and stops.")
    found = subprocess.run(
        [sys.executable, *COMMAND, "chat", "--temperature", "0", "What is 3 + 4?"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, "3 + 4 = 7.\n", "")
    began_s = time.monotonic()
    up.sendintr()
    up.expect_exact("stopping: running requests get 30 s; Ctrl-C again stops at once")
    up.expect(pexpect.EOF)
    assert "Traceback" not in up.before
    assert time.monotonic() - began_s < 25, "no request ran, so nothing had to be waited for"
    up.wait()
    assert up.exitstatus == 0


def test_doctor_prints_a_table_of_its_checks(spawn: Any) -> None:
    doctor = spawn("doctor", "--port", "0", "--grpc-port", "0", "--scheduler-port", "0", "--cache-port", "0")
    doctor.expect(pexpect.EOF)
    doctor.wait()
    assert doctor.exitstatus == 0, doctor.before
    for name in ("Python", "cores", "NVIDIA GPU", "FlashInfer", "checkpoint", "tokenizer"):
        assert f"\n{name} " in doctor.before
    assert "`paceline up` can serve" in doctor.before
