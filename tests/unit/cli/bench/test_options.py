"""The flags of `paceline bench`: defaults, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.bench.load.arrivals import OfferedLoad
from services.cli.bench.main import main
from services.cli.bench.options import parse_options
from services.cli.servers import announced

URL = ("--url", "http://127.0.0.1:9")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)


def test_defaults() -> None:
    options = parse_options([*URL])
    assert options.url == "http://127.0.0.1:9/v1"
    assert [str(load) for load in options.loads] == ["1 at once", "4 at once", "16 at once"]
    assert options.limits.duration_s == 20
    assert options.seed != parse_options([*URL]).seed
    assert parse_options(["--url", "https://host/prefix/v1/"]).url == "https://host/prefix/v1"


def test_the_running_server_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    with announced(8123, "m", "127.0.0.1:1", "127.0.0.1:2"):
        options = parse_options([])
        assert (options.url, options.api_key) == ("http://127.0.0.1:8123/v1", "secret")
        with announced(8124, "n", "127.0.0.1:1", "127.0.0.1:2"):
            assert parse_options(["--server", "n"]).url == "http://127.0.0.1:8124/v1"
            with pytest.raises(SystemExit):
                parse_options([])


def test_a_server_with_tls_is_verified_with_its_own_ca(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    with announced(8123, "m", "127.0.0.1:1", "127.0.0.1:2", str(tmp_path)):
        options = parse_options([])
    assert (options.url, options.ca_file) == ("https://127.0.0.1:8123/v1", str(tmp_path / "ca.pem"))


def test_the_flags_of_a_load_are_read() -> None:
    assert parse_options([*URL, "--poisson", "0.5,2"]).loads == (OfferedLoad("poisson", 0.5), OfferedLoad("poisson", 2))
    options = parse_options([*URL, "--ramp", "1-64", "--slo", "ttft=1s"])
    assert (options.loads, options.ramp) == ((), (1, 64))
    options = parse_options([*URL, "--trace", "x.jsonl", "--trace-speed", "2"])
    assert (options.loads, options.limits.duration_s) == ((OfferedLoad("trace", 2),), 60)
    assert parse_options([*URL, "--trace", "x.jsonl", "--rate", "3"]).loads == (OfferedLoad("rate", 3),)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no `paceline up` runs here; name a server with --url"),
        ([*URL, "--server", "8000"], "give --url or --server"),
        (["--url", "localhost:8000"], "expected a URL"),
        ([*URL, "--rate", "0"], "--rate: expected a number above 0"),
        ([*URL, "--rate", "nan"], "--rate: expected a number above 0"),
        ([*URL, "--concurrency", "1.5"], "whole numbers"),
        ([*URL, "--concurrency", "2,2"], "occurs twice"),
        ([*URL, "--rate", "1", "--poisson", "1"], "not allowed with"),
        ([*URL, "--ramp", "1-8"], "--ramp needs --slo"),
        ([*URL, "--ramp", "8-1", "--slo", "ttft=1s"], "the first rate is above the last"),
        ([*URL, "--slo", "p99=1s"], "there is no 'p99' in an SLO"),
        ([*URL, "--trace-speed", "2"], "--trace-speed needs --trace"),
        ([*URL, "--warmup", "20s"], "--warmup is not shorter"),
        ([*URL, "--token-ids", "100"], "needs --endpoint completion"),
        ([*URL, "--extra-body", "[1]"], "expected a JSON object"),
        ([*URL, "--json", "/no/such/folder/x.json"], "its folder does not exist"),
        ([*URL, "--cacert", "/no/file.pem"], "there is no file"),
        ([*URL, "--api-key", "a\nb"], "printable ASCII"),
        ([*URL, "--bogus"], "--bogus"),
        ([*URL, "--trace", "/no/trace.jsonl"], "/no/trace.jsonl: No such file"),
        (["compare", "/no/a.json", "/no/b.json"], "/no/a.json: No such file"),
        (["compare", "a.json"], "B.json"),
    ],
)
def test_a_mistake_gets_one_error_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("paceline bench")
    assert captured.err.count("\n") == 1


def test_an_absent_server_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*URL]) == 1
    line = capsys.readouterr().err
    assert line.startswith("paceline bench: http://127.0.0.1:9/v1/models: ")
    assert line.count("\n") == 1
