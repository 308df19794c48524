"""The fork server of the tests: a forked service is like one that was started as a new Python process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.fork_server import ForkedProcess, ServiceProcess, Start, quickest_start, start_python

pytestmark = pytest.mark.skipif(quickest_start() is start_python, reason="the fork server is not in use")
SERVICES = ["cache", "scheduler", "worker", "gateway"]


def start(
    log: Path, *arguments: str, service: str = "cache", by: Start | None = None, **environment: str
) -> ServiceProcess:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_PARENT_PID": str(os.getpid()), **environment}
    with log.open("ab") as file:
        return (by or quickest_start())(service, ["tests.support.process_state", *arguments], file, given)


def told(log: Path) -> dict[str, Any]:
    """What the process has written, when it has written all of it."""
    deadline = time.monotonic() + 60
    while "\n" not in (text := log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return next(json.loads(line) for line in text.splitlines() if line.startswith("{"))


@pytest.mark.parametrize("service", SERVICES)
def test_a_forked_process_is_given_what_a_new_one_is(tmp_path: Path, service: str) -> None:
    """Also while another forked process runs: the new one inherits none of the fork server's files for the other."""
    log, states = tmp_path / "a.log", []
    other = start(tmp_path / "other.log", "wait", service=service)
    for by in (quickest_start(), start_python):
        process = start(log, "exit", "0", "a word", service=service, by=by, PACELINE_TOLD="yes")
        assert isinstance(process, ForkedProcess) == (by is not start_python)
        assert process.wait(60) == 0
        states.append(told(log))
        log.unlink()
    other.kill()
    forked, new = states
    assert forked["same"] == new["same"]
    assert forked["same"]["environment"]["PACELINE_TOLD"] == "yes"
    assert forked["parent"] == [forked["parent"][0], str(forked["parent"][0])]


def test_two_forked_processes_share_no_random_state(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    for log in logs:
        assert start(log, "exit", "0", service="worker").wait(60) == 0
    first, second = (told(log)["own"] for log in logs)
    assert not [name for name in first if first[name] == second[name]]


def test_a_forked_process_tells_its_exit_status_and_its_log_has_the_traceback(tmp_path: Path) -> None:
    process = start(tmp_path / "a.log", "exit", "7")
    assert process.wait(60) == process.returncode == process.poll() == 7
    process.kill()  # as Popen's: no effect on an ended process
    assert "on stderr" in (tmp_path / "a.log").read_text()
    assert start(tmp_path / "b.log", "raise").wait(60) == 1
    assert "ValueError: as planned" in (tmp_path / "b.log").read_text()


def test_signals_stop_freeze_and_kill_a_forked_process(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        process = start(log := tmp_path / f"{number}.log", "wait")
        assert told(log)["own"]["pid"] == process.pid
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        assert process.wait(60) == -number


def test_a_changed_variable_that_imports_may_read_starts_a_new_python_and_stderr_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(log := tmp_path / "a.log", "exit", "0", OMP_NUM_THREADS="2")
    assert isinstance(process, subprocess.Popen)
    assert process.wait(60) == 0
    assert capsys.readouterr().err == "fork server: not used, because these differ from its own: OMP_NUM_THREADS\n"
    assert told(log)["same"]["environment"]["OMP_NUM_THREADS"] == "2"


def test_a_forked_service_ends_when_the_process_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    """Also if the thread that asked for the service has ended before."""
    code = """
        import os, pathlib, sys, threading, time
        from tests.support.fork_server import quickest_start
        command = ["services.cli", "serve", "cache", "--port", "0", "--metrics-port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_PARENT_PID": str(os.getpid())}
        def ask():
            with open(sys.argv[1], "ab") as log:
                print(quickest_start()("cache", command, log, environment).pid, flush=True)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        time.sleep(100)
    """
    log = tmp_path / "cache.log"
    asker = [sys.executable, "-c", textwrap.dedent(code), str(log)]
    with subprocess.Popen(asker, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        service = psutil.Process(int(process.stdout.readline()))
        server = service.parent()
        assert server is not None
        while "listens" not in log.read_text():
            assert service.is_running(), log.read_text()
            time.sleep(0.05)
        process.kill()
    server.wait(30)
    service.wait(30)
