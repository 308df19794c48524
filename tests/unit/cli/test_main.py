"""The command line itself: help, bad input, and which modules a command imports."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from services.cli.main import INTERRUPTED, SERVICES, main


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *argv], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for command in ("up", "serve", "worker", "version"):
        assert f"\n  {command} " in text
    assert max(map(len, text.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"paceline {version('paceline')}\n"


@pytest.mark.parametrize(
    ("argv", "word"),
    [(["sevre"], "'sevre'"), (["serve"], "name a service"), (["serve", "cash"], "'cash'"), (["serve", "--x"], "name")],
)
def test_an_unknown_command_or_service_gets_one_error_line(
    argv: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert word in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("argv", [["up"], ["worker"], *(["serve", name] for name in SERVICES)])
def test_every_command_names_a_bad_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*argv, "--bogus"])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"paceline {' '.join(argv)}: ")
    assert "--bogus" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("service", "absent"), [("scheduler", "torch starlette"), ("cache", "torch starlette"), ("gateway", "torch")]
)
def test_a_service_imports_only_what_it_needs(service: str, absent: str) -> None:
    settings, _, server = SERVICES[service]
    code = f"import sys, services.cli.main, {settings}, {server}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {*absent.split()} & {*done.stdout.split()}
    assert server in done.stdout.split()


def test_ctrl_c_while_a_command_is_being_imported_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["up"]) == main(["serve", "worker"]) == INTERRUPTED


def test_nothing_slow_is_imported_before_ctrl_c_is_handled() -> None:
    code = "import sys, services.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"pydantic", "structlog", "grpc", "uvloop", "rich"} & {*done.stdout.split()}


def test_a_taken_port_gets_one_error_line() -> None:
    import socket

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for flags in (["--port", str(port), "--metrics-port", "0"], ["--port", "0", "--metrics-port", str(port)]):
            done = run("serve", "cache", *flags)
            assert done.returncode == 1
            lines = [line for line in done.stderr.splitlines() if line.startswith("paceline serve cache: ")]
            assert len(lines) == 1
            assert "Traceback" not in done.stderr


def test_a_reader_that_stops_early_gets_no_traceback(tmp_path: Path) -> None:
    requests = ", ".join(f'{{"id": "{i}", "prompt_len": 9, "max_new_tokens": 90}}' for i in range(40))
    path = tmp_path / "scenario.json"
    path.write_text(
        '{"block_size": 4, "num_blocks": 90, "max_num_seqs": 2, "max_batched_tokens": 64, "max_model_len": 100, '
        f'"requests": [{requests}]}}'
    )
    command = f"{sys.executable} -m services.cli scenario {path} --json | head -c 9"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ('{"steps":', "")


ECHO = """
import services.cli, asyncio, contextlib, grpc, grpc.aio
from pathlib import Path

async def echo(requests, context):
    async for request in requests:
        yield request

async def main():
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"Stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/Echo/Stream")()
        counts = []
        for _ in range(3):
            before = switches()
            for _ in range(100):
                await call.write(b"x")
                await call.read()
            counts.append(switches() - before)
    print(min(counts))
    await server.stop(None)

def switches():
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            if (task / "comm").read_text().startswith("event_engine"):
                status = (task / "status").read_text()
                total += int(status.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])
    return total

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see which threads have run")
def test_grpc_does_not_hand_messages_from_thread_to_thread() -> None:
    """docs/adr/0007. Fails when a new grpcio does not know the names in GRPC_EXPERIMENTS any more."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run([sys.executable, "-c", ECHO], capture_output=True, text=True, timeout=60, check=True, env=env)
    assert "experiment" not in done.stderr
    # The threads also wake for timers.
    assert int(done.stdout) < 100, "switches of gRPC's EventEngine threads in 100 echoes, the least of three times"
