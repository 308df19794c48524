"""`paceline up` as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port

FLAGS = ("--port", "--grpc-port", "--scheduler-port", "--cache-port")
# No test here reads metrics. A metrics port would need a free port for each service but the gateway.
METRICS = ("--metrics-port", "0")


def command(*arguments: str) -> list[str]:
    ports = [word for flag in FLAGS for word in (flag, str(free_port()))]
    return [sys.executable, "-m", "services.cli", "up", "--threads", "1", *ports, *METRICS, *arguments]


@contextmanager
def running(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        up = subprocess.Popen(command(*arguments), stdout=out, stderr=subprocess.STDOUT)
    try:
        yield up
    finally:
        up.terminate()
        up.wait(60)


def wait_until(holds: Callable[[], bool], log: Path) -> None:
    give_up_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up_s, log.read_text()
        time.sleep(0.05)


def test_up_ends_with_one_line_if_the_model_does_not_fit(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 8192, "intermediate_size": 2**40,
        "num_hidden_layers": 8, "num_attention_heads": 64, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = command("--model", str(tmp_path), "--load-format", "dummy")
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"paceline up: worker-1 ended with status 4: {tmp_path} does not fit into memory: it needs ")


def test_up_restarts_a_killed_worker_and_says_that_memory_may_be_short(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with running(log) as up:
        wait_until(lambda: "Ctrl-C" in log.read_text(), log)
        children = psutil.Process(up.pid).children()
        [worker] = [child for child in children if "serve worker " in " ".join(child.cmdline())]
        worker.kill()
        wait_until(lambda: "starts again" in log.read_text(), log)
        assert "was killed by signal 9 (SIGKILL): the kernel may have been out of memory" in log.read_text()


def test_without_workers_it_says_that_nothing_is_computed(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with running(log, "--workers", "0"):
        wait_until(lambda: "Ctrl-C" in log.read_text(), log)
        assert "No worker was started: nothing is computed until a worker joins." in log.read_text()


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_commands_reach_each_of_two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder, logs = tmp_path / "paceline" / "servers", [tmp_path / "first.log", tmp_path / "second.log"]
    with running(logs[0], "--workers", "0"), running(logs[1], "--workers", "0", "--preset", "sglang") as second:
        for log in logs:
            wait_until(lambda log=log: "Ctrl-C" in log.read_text(), log)  # type: ignore[misc]
        ports = sorted(int(path.stem) for path in folder.glob("*.json"))
        ambiguous = paceline("policy", "get")
        assert ambiguous.returncode == 2
        assert ambiguous.stderr.startswith(
            f"paceline policy: 2 servers run here: {ports[0]} (paceline-demo), {ports[1]} "
        )
        presets = {paceline("policy", "get", "--server", str(port)).stdout.split()[2] for port in ports}
        assert presets == {"paceline:", "sglang:"}
        assert all(paceline("cache", "stats", "--server", str(port)).returncode == 0 for port in ports)
        second.kill()
        second.wait()
        assert paceline("policy", "get").stdout.split()[2] == "paceline:"
    assert len(list(folder.glob("*.json"))) == 1, "the one that was killed could not remove its file"
    none = paceline("policy", "get")
    assert (none.returncode, none.stdout) == (1, "")
    assert "; no `paceline up` runs here: name the scheduler with --scheduler HOST:PORT\n" in none.stderr
