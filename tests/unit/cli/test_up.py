"""`paceline up`: what it starts with which flags, which ports it takes, what it shows. No process is started here."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from services.cli.servers import announced
from services.cli.up.child import Child, lines_of
from services.cli.up.main import run
from services.cli.up.plan import environment, plan
from services.cli.up.ports import CannotServe, Ports, pick_port
from services.cli.up.screen import Screen, own_command
from services.cli.up.settings import UpSettings
from services.runtime.settings import load_settings
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_CONFIG", "PACELINE_LOG_LEVEL", "PACELINE_UP_PORT", "PACELINE_TLS_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


class Up:
    """The parts of one `paceline up` that need no process."""

    def __init__(self, *argv: str) -> None:
        self.settings = load_settings(UpSettings, argv, prog="paceline up")
        self.ports = Ports(self.settings)
        self.plan = plan(self.settings, self.ports, is_terminal=False)
        self.out = io.StringIO()
        self.screen = Screen(Console(file=self.out, width=80))

    def show(self, model: str) -> str:
        self.screen.show_server(self.settings, self.ports, model)
        return self.out.getvalue()


@pytest.mark.parametrize("given", ["--pooling", "folder"])
async def test_an_embedding_server_shows_how_to_embed(tmp_path: Path, given: str) -> None:
    (tmp_path / "modules.json").touch()
    chosen = ["--pooling", "mean"] if given == "--pooling" else ["--model", str(tmp_path)]
    shown = Up("--port", "0", *chosen).show("m")
    assert "/v1/embeddings" in shown
    assert "chat" not in shown
    more = shown.partition("One more worker:")[2].split()
    assert [word for word in chosen if word not in more] == [], "else the scheduler refuses that worker"


def flags(child: Child) -> dict[str, str]:
    return dict(zip(child.flags[::2], child.flags[1::2], strict=True))


async def test_services_start_in_order_and_know_one_another() -> None:
    children = Up("--port", "0", "--workers", "2").plan
    assert [child.name for child in children] == ["cache", "scheduler", "worker-1", "worker-2", "gateway"]
    cache, scheduler, worker, _, gateway = map(flags, children)
    assert scheduler["--cache"] == f"127.0.0.1:{cache['--port']}"
    assert worker["--scheduler"] == gateway["--scheduler"] == f"127.0.0.1:{scheduler['--port']}"
    assert len({cache["--port"], scheduler["--port"], gateway["--port"], gateway["--grpc-port"]}) == 4


async def test_flags_reach_the_services_that_take_them() -> None:
    children = Up("--port", "0", "--model", "/m", "--block-size", "8", "--threads", "1", "--window", "1",
                 "--max-model-len", "64", "--num-blocks", "9", "--dtype", "float32", "--load-format", "dummy",
                 "--log-level", "debug", "--speculative-tokens", "5", "--quantization", "int8").plan  # fmt: skip
    _, scheduler, worker, gateway = map(flags, children)
    chosen = {"--model": "/m", "--block-size": "8", "--threads": "1", "--num-blocks": "9", "--dtype": "float32"}
    assert {**worker, **chosen, "--load-format": "dummy", "--max-model-len": "64", "--quantization": "int8"} == worker
    assert {**gateway, "--model": "/m", "--max-model-len": "64"} == gateway
    assert {**scheduler, "--window": "1", "--speculative-tokens": "5"} == scheduler
    assert all(flags(child)["--log-level"] == "debug" for child in children)


async def test_a_setting_that_was_not_given_is_left_to_the_service() -> None:
    """So that `worker.block_size` in the file, or PACELINE_WORKER_BLOCK_SIZE, holds under `up` too."""
    _, scheduler, worker, gateway = map(flags, Up("--port", "0").plan)
    for name in ("--block-size", "--dtype", "--load-format", "--threads", "--num-blocks", "--model", "--max-model-len"):
        assert name not in worker
        assert name not in gateway
    assert "--window" not in scheduler
    assert "--local-workers" not in worker


async def test_several_workers_are_told_that_they_share_the_cores() -> None:
    workers = [child for child in Up("--port", "0", "--workers", "2").plan if child.service == "worker"]
    assert [flags(worker)["--local-workers"] for worker in workers] == ["2", "2"]


async def test_the_configuration_file_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("up: {workers: 3}\nworker: {block_size: 8}\n")
    monkeypatch.chdir(tmp_path)
    running = Up("--port", "0", "--config", "c.yaml")
    assert [child.service for child in running.plan].count("worker") == 3
    assert environment(running.settings)["PACELINE_CONFIG"] == str(tmp_path / "c.yaml")
    assert "PACELINE_CONFIG" not in environment(Up("--port", "0").settings)


async def test_only_the_gateway_listens_to_the_world() -> None:
    running = Up("--port", "0", "--host", "0.0.0.0")
    hosts = {child.service: flags(child)["--host"] for child in running.plan}
    assert hosts == {"cache": "127.0.0.1", "scheduler": "127.0.0.1", "worker": "127.0.0.1", "gateway": "0.0.0.0"}
    shown = running.show("m")
    assert "http://127.0.0.1:" in shown
    assert "0.0.0.0" not in shown


async def test_metrics_have_fixed_ports_and_are_printed() -> None:
    """The ports of `serve` by default: scheduler, cache, then each worker."""
    assert UpSettings.model_fields["metrics_port"].default == 9101
    first = free_ports_in_a_row(4)
    running = Up("--port", "0", "--workers", "2", "--metrics-port", str(first))
    ports = {child.name: flags(child).get("--metrics-port") for child in running.plan}
    names = ["scheduler", "cache", "worker-1", "worker-2"]
    assert ports == {name: str(first + i) for i, name in enumerate(names)} | {"gateway": None}
    urls = [f"http://127.0.0.1:{first + i}/metrics" for i in range(4)]
    shown = dict(line.split() for line in running.show("m").splitlines() if line.endswith("/metrics"))
    assert shown == dict(zip(names, urls, strict=True)) | {"gateway": f"{running.ports.url}/metrics"}


async def test_a_metrics_port_that_is_taken_is_refused_or_replaced(busy: int) -> None:
    with pytest.raises(CannotServe, match=f"--metrics-port: 127.0.0.1:{busy} cannot be used"):
        Up("--port", "0", "--metrics-port", str(busy))
    with pytest.raises(CannotServe, match="--metrics-port: cache would get port 65536; 65535 is the highest"):
        Up("--port", "0", "--metrics-port", "65535", "--workers", "0")
    chosen = Up("--port", "0", "--metrics-port", "0").ports.metrics
    assert len({*chosen.values()}) == 3


def free_ports_in_a_row(count: int) -> int:
    """The first of them."""
    for _ in range(100):
        first = free_port()
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return first
    raise AssertionError("no free ports in a row")


async def test_a_line_of_a_child_stays_one_line_in_a_pipe() -> None:
    running = Up("--port", "0")
    child = running.plan[0]
    running.screen.relay(child, '{"message": "' + "x" * 300 + ' [bold]"}')
    assert running.out.getvalue().count("\n") == 1
    assert "[bold]" in running.out.getvalue()


async def test_all_that_a_child_says_is_read_however_long_its_lines() -> None:
    said = asyncio.StreamReader(limit=1000)
    said.feed_data(b"short\n" + b"x" * 5000 + b"\n\xff\n\nlast")
    said.feed_eof()
    lines = [line async for line in lines_of(said)]
    assert lines[0] == "short"
    assert lines[-3:] == ["\ufffd", "", "last"]
    assert "".join(lines[1:-3]) == "x" * 5000


async def test_the_commands_that_up_prints_can_be_copied() -> None:
    running = Up("--port", "0")
    (worker,) = [line for line in running.show("paceline-demo").splitlines() if "paceline worker" in line]
    assert worker.endswith(f"paceline worker --scheduler 127.0.0.1:{running.ports.scheduler}")


def test_without_workers_up_says_that_nothing_is_computed() -> None:
    said = "nothing is computed until a worker joins"
    assert said in Up("--port", "0", "--workers", "0").show("m")
    assert said not in Up("--port", "0", "--workers", "1").show("m")


async def test_one_more_worker_serves_the_same_model() -> None:
    running = Up("--port", "0", "--model", "/a b/c", "--load-format", "dummy", "--block-size", "8",
                 "--quantization", "int8")  # fmt: skip
    (worker,) = [line for line in running.show("c").splitlines() if "paceline worker" in line]
    assert worker.endswith(" --model '/a b/c' --load-format dummy --quantization int8 --block-size 8")


def test_the_command_for_one_more_worker_works_in_a_new_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert own_command(".venv/bin/paceline") == own_command(f"{tmp_path}/.venv/bin/paceline") == ".venv/bin/paceline"
    assert own_command("/opt/app/bin/paceline") == "/opt/app/bin/paceline"
    assert own_command("/somewhere/services/cli/__main__.py") == "paceline"


def test_a_busy_default_port_is_replaced(busy: int) -> None:
    assert pick_port("127.0.0.1", busy, explicit=False, flag="cache-port", taken=set()) != busy


def test_a_busy_port_that_was_asked_for_is_an_error(busy: int) -> None:
    with pytest.raises(CannotServe, match=rf"--cache-port: 127\.0\.0\.1:{busy} "):
        pick_port("127.0.0.1", busy, explicit=True, flag="cache-port", taken=set())


async def test_a_variable_asks_for_a_port_too(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_UP_PORT", str(busy))
    with pytest.raises(CannotServe, match="--port"):
        Up()


async def test_one_port_cannot_be_asked_for_twice() -> None:
    port = str(free_port())
    with pytest.raises(CannotServe, match="--grpc-port"):
        Up("--port", port, "--grpc-port", port)


@pytest.mark.parametrize(
    ("terminal", "asked", "told"),
    [
        (True, [], "human"),
        (False, [], "auto"),  # which is JSON in a pipe
        (True, ["--log-format", "json"], "json"),
        (False, ["--log-format", "human"], "human"),
    ],
)
async def test_services_write_json_without_a_terminal_or_on_demand(terminal: bool, asked: list[str], told: str) -> None:
    settings = load_settings(UpSettings, ["--port", "0", *asked], prog="paceline up")
    children = plan(settings, Ports(settings), is_terminal=terminal)
    assert {flags(child)["--log-format"] for child in children} == {told}


async def test_a_json_line_of_a_service_stays_valid_json() -> None:
    running = Up("--port", "0")
    line = json.dumps(
        {"timestamp": "2026-01-02T03:04:05Z", "service": "cache", "message": "[red]a :x: " + "long " * 50}
    )
    line = line.replace(": ", ":", 1)
    running.screen.relay(running.plan[0], line)
    running.screen.relay(running.plan[0], "plain words")
    first, second = running.out.getvalue().splitlines()
    assert first == line
    assert second.split(maxsplit=1) == ["cache", "plain words"]


async def test_keys_reach_the_services_that_know_them() -> None:
    children = {child.service: child.flags for child in Up("--port", "0", "--keys-file", "/k", "--insecure").plan}
    with_file = {name for name, given in children.items() if "--keys-file" in given}
    assert with_file == {"cache", "scheduler", "gateway"}
    assert [name for name, given in children.items() if "--insecure" in given] == ["gateway"]
    assert not any("--keys-file" in child.flags or "--insecure" in child.flags for child in Up("--port", "0").plan)
    shown = Up("--port", "0", "--keys-file", "/k").show("m")
    assert "Authorization: Bearer $PACELINE_API_KEY" in shown
    assert "Authorization" not in Up("--port", "0").show("m")


def test_tls_reaches_every_service_and_the_screen(tmp_path: Path) -> None:
    up = Up("--port", "0", "--tls-dir", str(tmp_path))
    assert all(flags(child)["--tls-dir"] == str(tmp_path) for child in up.plan)
    assert up.ports.url.startswith("https://")
    shown = up.show("demo")
    assert f"curl --cacert {tmp_path / 'ca.pem'} https://" in shown
    assert f"--tls-dir {tmp_path}" in shown


def test_a_certificate_for_clients_reaches_the_gateway_alone(tmp_path: Path) -> None:
    given = {"--http-cert": "/c.pem", "--http-key": "/k.pem", "--tls-client-ca": "/ca.pem"}
    up = Up("--port", "0", "--tls-dir", str(tmp_path), *(word for pair in given.items() for word in pair))
    *others, gateway = map(flags, up.plan)
    assert {**gateway, **given} == gateway
    assert not any(set(given) & set(other) for other in others)
    assert "--cacert" not in up.show("demo")  # `up` assumes a certificate of a public CA


def test_clients_without_tls_are_served_where_a_proxy_encrypts(tmp_path: Path) -> None:
    up = Up("--port", "0", "--tls-dir", str(tmp_path), "--no-http-tls")
    assert up.ports.url.startswith("http://")
    assert "--no-http-tls" in up.plan[-1].flags
    assert "--cacert" not in up.show("demo")


def test_up_needs_a_certificate_for_its_own_health_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Up("--http-cert", "/c.pem", "--http-key", "/k.pem", "--tls-client-ca", "/ca.pem")
    assert "--tls-client-ca needs --tls-dir" in capsys.readouterr().err


async def test_up_ends_with_one_line_if_a_certificate_cannot_be_used(tmp_path: Path) -> None:
    settings = Up("--port", "0", "--tls-dir", str(tmp_path)).settings
    assert await run(settings, asyncio.Event(), Console(file=io.StringIO())) == (
        f"TLS: {tmp_path / 'cert.pem'}: No such file or directory"
    )


class StartedUp(Up):
    """On a terminal, while the services start."""

    def __init__(self) -> None:
        super().__init__("--port", "0")
        self.shown: list[str] = []
        self.screen = Screen(Console(file=self.out, width=200, force_terminal=True))
        self.screen.status = SimpleNamespace(update=self.shown.append)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("loading /m: 40 % of 1642 MiB", "loading ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 40 % of 1642 MiB"),
        ("capturing CUDA graphs: 50 % of 35", "capturing CUDA graphs ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 50 % of 35"),
        ("fetching a/b: 120 MiB so far", "fetching a/b: 120 MiB so far"),
    ],
)
async def test_the_status_line_names_the_services_that_are_not_ready(line: str, shown: str) -> None:
    up = StartedUp()
    worker = next(child for child in up.plan if child.service == "worker")
    up.screen.relay(worker, line)
    assert up.out.getvalue() == "", "progress is no line of its own"
    up.screen.show_pending(["gateway", "worker-1"])
    assert Text.from_markup(up.shown[-1]).plain == f"starting gateway, worker-1 {shown} (0 s)"
    up.screen.status = None  # once it serves, a worker that starts again shows lines
    up.screen.relay(worker, line)
    assert line in up.out.getvalue()


async def test_the_screen_shows_how_to_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "Or talk to it: paceline chat\n" in Up("--port", "0").show("m")
    up = Up("--port", "0")
    with announced(1, "a", "s:1", "c:1"), announced(2, "b", "s:2", "c:2"):
        assert f"paceline chat --server {up.ports.http}\n" in up.show("m")
