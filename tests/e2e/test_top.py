"""`paceline top` and `paceline trace`, asked of real services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pexpect
import pytest

from tests.support.stack import Stack
from tests.support.traces import check_trace, computed_within_steps

# Python 3.12 warns of pexpect's fork; the child calls nothing but exec.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

COMMAND = [sys.executable, "-m", "services.cli"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color"}


@pytest.fixture
def busy() -> Iterator[Any]:
    """Keeps a server busy with short answers, one after the other."""
    done = threading.Event()
    threads: list[threading.Thread] = []

    def load(url: str, client: int) -> None:
        body = {"prompt": f"Client {client} says", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        while not done.is_set():
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200

    def start(url: str) -> None:
        threads.extend(threading.Thread(target=load, args=(url, client)) for client in range(3))
        for thread in threads:
            thread.start()

    yield start
    done.set()
    for thread in threads:
        thread.join()


def paceline(environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv], env=environment, capture_output=True, text=True, timeout=90, check=False
    )  # fmt: skip


def test_a_snapshot_as_text_and_as_json(stack: Stack, environment: dict[str, str], busy: Any) -> None:
    busy(stack.url)
    text = paceline(environment, "top", "--url", stack.url, "--once")
    assert (text.returncode, text.stderr) == (0, "")
    for part in (f"paceline-demo at {stack.url}", "tokens/s", "TTFT", "policies paceline", "worker", "steps since"):
        assert part in text.stdout, part
    raw = paceline(environment, "top", "--url", stack.url, "--json")
    assert (raw.returncode, raw.stderr) == (0, "")
    snapshot = json.loads(raw.stdout)
    assert snapshot["gateway"]["tokens_per_s"] > 0
    assert snapshot["scheduler"]["steps"]


def test_the_screen_shows_a_restart_of_the_gateway_and_ends_with_q(
    own_stack: Stack, environment: dict[str, str]
) -> None:
    stack = own_stack.up()
    argv = [*COMMAND, "top", "--url", stack.url]
    top = pexpect.spawn(argv[0], argv[1:], env=environment, encoding="utf-8", timeout=60, dimensions=(40, 150))
    try:
        top.expect_exact("policies")
        top.expect_exact("q quit")
        top.send("\t")
        top.expect_exact("host blocks free")
        top.send("p")
        top.expect_exact("PAUSED")
        top.send("p")
        stack.kill("gateway")
        top.expect_exact("trying again")
        stack.start("gateway")
        top.expect_exact("connected again after")
        top.send("q")
        top.expect(pexpect.EOF)
        top.wait()
        assert top.exitstatus == 0
    finally:
        top.close(force=True)


def test_without_a_server_each_command_is_one_line(environment: dict[str, str]) -> None:
    for argv in (("top", "--once"), ("top",), ("trace", "-")):
        failed = paceline(environment, *argv, "--url", "http://127.0.0.1:1")
        assert (failed.returncode, failed.stdout) == (1, "")
        assert failed.stderr.startswith(f"paceline {argv[0]}: no server answers at http://127.0.0.1:1")
        assert failed.stderr.count("\n") == 1


def test_a_trace_has_the_steps_of_all_services(
    stack: Stack, environment: dict[str, str], tmp_path: Path, busy: Any
) -> None:
    busy(stack.url)
    file = tmp_path / "out.json"
    done = paceline(environment, "trace", "--url", stack.url, "--seconds", "3", str(file))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    content = json.loads(file.read_text())
    check_trace(content)
    assert computed_within_steps(content) > 10
    processes = {one["args"]["name"] for one in content["traceEvents"] if one["name"] == "process_name"}
    assert {"gateway", "scheduler", "cache"} <= processes
    names = {one["name"] for one in content["traceEvents"]}
    assert {"tokens", "read", "plan", "exchange", "apply", "worker_message", "completion", "output"} <= names
    # All services are on one machine, and have one clock: the true offsets are 0.
    about = content["otherData"]
    for service, offset in about["clock_offsets_us"].items():
        assert abs(offset) <= about["clock_errors_us"][service] + 2, service
    assert about["num_missed"] == 0
