"""How a command finds a server (flag, environment, state file). If none answers, the command prints one error line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1.admin_pb2 import ExplainResponse, Explanation, GetPolicyResponse, PolicyChoice
from paceline.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from services.cli import policy, servers
from services.cli.main import main
from services.cli.servers import Server, announced, running_servers


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("PACELINE_SERVER", "PACELINE_SCHEDULER", "PACELINE_CACHE", "PACELINE_WORKER_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "paceline" / "servers"


class Admin(AdminServiceServicer):
    def __init__(self, name: str) -> None:
        self.name = name

    def GetPolicy(self, request: Any, context: Any) -> GetPolicyResponse:
        return GetPolicyResponse(choice=PolicyChoice(order=self.name))

    def Explain(self, request: Any, context: Any) -> ExplainResponse:
        return ExplainResponse(explanations=[Explanation(reason=self.name)])


@pytest.fixture(scope="module")
def schedulers() -> Iterator[dict[str, str]]:
    """The addresses of two schedulers, by name. Each scheduler reports its own name as its order policy."""
    servers, addresses = [], {}
    for name in ("first", "second"):
        server = grpc.server(futures.ThreadPoolExecutor(2))
        add_AdminServiceServicer_to_server(Admin(name), server)
        addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
    yield addresses
    for server in servers:
        server.stop(None)


@pytest.fixture
def closed() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def get(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The order in force, as `paceline policy get` prints it; else the error."""
    code = main(["policy", "get", *flags])
    printed = capsys.readouterr()
    if code == 0:
        return printed.out.partition("order ")[2].partition(",")[0]
    [line] = printed.err.splitlines()
    return line


def test_the_only_running_server_is_found(schedulers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with announced(8010, "demo", schedulers["second"], "127.0.0.1:1"):
        assert get(capsys) == "second"
        assert main(["explain", "r1"]) == 0
        assert "second" in capsys.readouterr().out
    assert running_servers() == []


def test_a_server_is_chosen_by_port_model_or_variable(
    schedulers: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        announced(8000, "small", schedulers["first"], "127.0.0.1:1"),
        announced(8010, "large", schedulers["second"], "127.0.0.1:1"),
    ):
        assert get(capsys) == (
            "paceline policy: 2 servers run here: 8000 (small), 8010 (large); "
            "choose one with --server, like --server 8000, or with PACELINE_SERVER"
        )
        assert get(capsys, "--server", "8010") == "second"
        assert get(capsys, "--server", "small") == "first"
        assert "there is no server '9'; there are 8000 (small), 8010 (large)" in get(capsys, "--server", "9")
        monkeypatch.setenv("PACELINE_SERVER", "8010")
        assert get(capsys) == "second"
        assert get(capsys, "--server", "8000") == "first"
        monkeypatch.setenv("PACELINE_SCHEDULER", schedulers["first"])
        assert get(capsys) == "first"
        assert get(capsys, "--server", "8010") == "second"
        assert get(capsys, "--scheduler", schedulers["second"], "--server", "8000") == "second"


def test_a_model_name_that_two_servers_share_is_refused(
    schedulers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        announced(8000, "demo", schedulers["first"], "127.0.0.1:1"),
        announced(8010, "demo", schedulers["second"], "127.0.0.1:1"),
    ):
        assert "--server: 2 servers have this name: 8000 (demo), 8010 (demo)" in get(capsys, "--server", "demo")


def test_a_state_file_of_a_process_that_ended_is_ignored_and_removed_by_the_next_server(
    folder: Path, schedulers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with announced(8000, "demo", schedulers["first"], "127.0.0.1:1") as announcement:
        mine = announcement.server
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    ended = replace(mine, port=8001, pid=int(child.stdout))
    reused = replace(mine, port=8002, started="1")  # another process has its pid now
    other_boot = replace(mine, port=8003, machine="another boot")
    for server in (ended, reused, other_boot):
        (folder / f"{server.port}.json").write_text(json.dumps(asdict(server)))
    (folder / "8004.json").write_text("{")
    assert running_servers() == []
    assert "no `paceline up` runs here" in get(capsys)
    with announced(8000, "demo", schedulers["first"], "127.0.0.1:1"):
        assert get(capsys) == "first"
        assert sorted(path.name for path in folder.iterdir()) == ["8000.json", "8003.json", "8004.json"]


def test_a_server_does_not_remove_the_state_file_of_a_server_that_took_its_port(folder: Path) -> None:
    with announced(8000, "demo", "127.0.0.1:1", "127.0.0.1:2") as announcement:
        successor = replace(announcement.server, model="other")
        (folder / "8000.json").write_text(json.dumps(asdict(successor)))
    assert running_servers() == [successor]


def test_only_the_owner_can_read_a_state_file(folder: Path) -> None:
    with announced(8000, "demo", "127.0.0.1:1", "127.0.0.1:2"):
        assert (folder / "8000.json").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
    # A running process with this pid is not enough: the machine and the start time must also be the same.
    assert Server(8000, "", "a:1", "b:2", os.getpid(), "", "").runs is False


def test_a_user_without_a_home_has_no_state_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert running_servers() == []
    with pytest.raises(OSError, match="home directory"), announced(8000, "demo", "127.0.0.1:1", "127.0.0.1:2"):
        pass


def test_without_a_server_a_command_prints_one_error_line(
    closed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(servers.DEFAULT_ADDRESSES, "scheduler", closed)
    nothing = f"no scheduler answers at {closed} (Connection refused)"
    hint = "; no `paceline up` runs here: name the scheduler with --scheduler HOST:PORT"
    assert get(capsys) == f"paceline policy: {nothing}{hint}"
    assert get(capsys, "--scheduler", closed) == f"paceline policy: {nothing}"
    with announced(8000, "demo", closed, closed):
        may_start = "; server 8000 (demo) runs, but its scheduler may be starting"
        assert get(capsys) == f"paceline policy: {nothing}{may_start}"
        assert main(["cache", "stats"]) == 1
        assert capsys.readouterr().err.startswith(
            f"paceline cache: no cache answers at {closed} (Connection refused); "
        )
    monkeypatch.setenv("PACELINE_SCHEDULER", closed)
    assert get(capsys) == f"paceline policy: {nothing}; the address is that of PACELINE_SCHEDULER"


def test_an_address_that_is_no_scheduler_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert get(capsys, "--scheduler", address) == (
        f"paceline policy: {address} is no scheduler of Paceline, or an older one: it does not know this call"
    )
    server.stop(None)


def test_an_http_server_is_no_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = get(capsys, "--scheduler", address)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert said == f"paceline policy: {address} does not speak gRPC, so it is no scheduler"


def test_a_command_prints_one_error_line_if_the_server_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "TIMEOUT_S", 0.2)
    asked, answer = threading.Event(), threading.Event()

    class Silent(AdminServiceServicer):
        def GetPolicy(self, request: Any, context: Any) -> GetPolicyResponse:
            asked.set()
            answer.wait()
            return GetPolicyResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_AdminServiceServicer_to_server(Silent(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        said = get(capsys, "--scheduler", address)
    finally:
        answer.set()
        server.stop(None)
    assert said == f"paceline policy: {address} did not answer in time"


@pytest.mark.parametrize("command", [["policy", "get"], ["explain", "r1"], ["cache", "stats"]])
def test_an_impossible_address_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--cache" if command[0] == "cache" else "--scheduler"
    assert main([*command, flag, "8000"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline {command[0]}: {flag}: must be host:port")


def test_a_worker_needs_a_choice_among_several_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with announced(8000, "a", "127.0.0.1:1", "127.0.0.1:2"), announced(8010, "b", "127.0.0.1:3", "127.0.0.1:4"):
        assert main(["worker"]) == 2
        assert "paceline worker: 2 servers run here" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["worker", "--server", "8010", "--print-config"])
        assert "scheduler: 127.0.0.1:3" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["worker", "--scheduler", "10.0.0.1:5", "--print-config"])
        assert "scheduler: 10.0.0.1:5" in capsys.readouterr().out


def test_certificates_come_from_the_flag_the_variable_or_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    def named(*flags: str) -> str:
        return get(capsys, *flags).removeprefix("paceline policy: ").partition(":")[0]

    with announced(8010, "demo", closed, closed, "/of-the-server"):
        assert named() == "/of-the-server/cert.pem"
        monkeypatch.setenv("PACELINE_TLS_DIR", "/of-the-variable")
        assert named() == "/of-the-variable/cert.pem"
        assert named("--tls-dir", "/of-the-flag") == "/of-the-flag/cert.pem"


def test_a_worker_gets_the_certificates_of_its_server(capsys: pytest.CaptureFixture[str]) -> None:
    with announced(8000, "a", "127.0.0.1:1", "127.0.0.1:2", "/certs"):
        for flags, folder in (([], "/certs"), (["--tls-dir", "/own"], "/own")):
            with pytest.raises(SystemExit):
                main(["worker", *flags, "--print-config"])
            assert f"tls_dir: {folder}\n" in capsys.readouterr().out


def test_a_state_file_of_an_earlier_version_means_no_tls(folder: Path) -> None:
    with announced(8010, "demo", "127.0.0.1:1", "127.0.0.1:2", "/certs"):
        [path] = folder.glob("*.json")
        values = json.loads(path.read_text())
        del values["tls_dir"]
        path.write_text(json.dumps(values))
        [server] = running_servers()
        assert server.tls_dir == ""
