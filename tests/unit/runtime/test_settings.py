"""Flags > environment > file > defaults, and one line that names what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from services.runtime.settings import Address, AddressList, ServiceSettings, load_settings, split_addresses


class ThingSettings(ServiceSettings, section="thing"):
    """A thing.

    With more to say than the first line.
    """

    port: int = Field(7000, ge=0, le=65535, description="port of the thing")
    max_tokens: int | None = Field(None, description="limit")
    chunked: bool = Field(True, description="in chunks")
    peer: Address = Field("127.0.0.1:7001", description="another thing")
    peers: AddressList = Field("127.0.0.1:7001", description="other things")
    options: dict[str, Any] = Field({}, description="of the thing")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_CONFIG", "PACELINE_LOG_LEVEL", "PACELINE_LOG_FORMAT", "PACELINE_THING_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "paceline.yaml"
    path.write_text("thing:\n  port: 7001\n  max-tokens: 5\ngateway:\n  port: 1\n")
    return path


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that load_settings ends the process with."""
    with pytest.raises(SystemExit) as end:
        load_settings(ThingSettings, argv)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_each_source_wins_over_the_next(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(ThingSettings, []).port == 7000
    monkeypatch.setenv("PACELINE_CONFIG", str(config))
    assert load_settings(ThingSettings, []).port == 7001
    monkeypatch.setenv("PACELINE_THING_PORT", "7002")
    assert load_settings(ThingSettings, []).port == 7002
    settings = load_settings(ThingSettings, ["--port", "7003", "--no-chunked"])
    assert (settings.port, settings.max_tokens, settings.chunked) == (7003, 5, False)


def test_the_config_flag_wins_over_the_variable(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CONFIG", "/nowhere.yaml")
    assert load_settings(ThingSettings, ["--config", str(config)]).port == 7001


def test_the_log_variables_are_shared_and_a_services_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "debug")
    monkeypatch.setenv("PACELINE_LOG_FORMAT", "json")
    monkeypatch.setenv("PACELINE_THING_LOG_LEVEL", "error")
    settings = load_settings(ThingSettings, [])
    assert (settings.log_level, settings.log_format) == ("error", "json")


def test_an_empty_variable_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_THING_PORT", "")
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "")
    assert load_settings(ThingSettings, []).model_fields_set == set()


def test_print_config_is_a_file_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_settings(ThingSettings, ["--port", "7004", "--print-config"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["thing"]["port"] == 7004
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    read = load_settings(ThingSettings, ["--config", str(path)])
    assert read.model_dump() == load_settings(ThingSettings, ["--port", "7004"]).model_dump()
    assert read.config_file == str(path)


def test_help_names_flags_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_settings(ThingSettings, ["--help"], prog="paceline thing")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: paceline thing" in text
    assert "A thing.\n" in text
    assert "more to say" not in text
    for word in ("--max-tokens", "PACELINE_THING_MAX_TOKENS", "--print-config", "port of the thing"):
        assert word in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], ["--port", "valid integer", "'x'"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--peer", "nonsense"], ["--peer", "host:port"]),
        (["--peer", "::1:7001"], ["--peer", "host:port"]),
        (["--peer", "host:99999"], ["--peer", "between 1 and 65535"]),
        (["--peers", "host:1,host"], ["--peers", "host:port"]),
        (["--peers", "host:1,"], ["--peers", "host:port"]),
        (["--peers", "host:1, host:1"], ["--peers", "twice"]),
        (["--options", "[1]"], ["options", "Parsing error"]),
        (["--options", '{"a"'], ["options", "Missing end"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--log-level", "loud"], ["--log-level", "'loud'"]),
        (["--bogus", "1"], ["--bogus"]),
        (["--max_tokens", "1"], ["--max_tokens"]),
        (["--por", "1"], ["--por"]),
        (["stray"], ["stray"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml", "No such file"]),
    ],
)
def test_a_bad_flag_is_named(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(argv, capsys)
    assert line.startswith("paceline serve thing: ")
    for word in words:
        assert word in line


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACELINE_THING_PORT", "many")
    assert "PACELINE_THING_PORT: " in fails([], capsys)
    monkeypatch.setenv("PACELINE_THING_PORT", "tcp://10.0.0.1:7000")
    assert "enableServiceLinks" in fails([], capsys)
    monkeypatch.delenv("PACELINE_THING_PORT")
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "loud")
    assert "PACELINE_LOG_LEVEL: " in fails([], capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thing: {port: many}", ["thing.port in", "valid integer"]),
        ("thing: {prot: 1}", ["thing.prot in", "no such setting"]),
        ("thing: 3", ["section thing must be a mapping"]),
        ("schedular: {port: 1}\n", ["there is no section schedular", "up, cache, scheduler, worker, gateway, thing"]),
        ("port: 1\nthing: {port: 2}\n", ["there is no section port"]),
        ("scheduler: {}\nthing: {prot: 2}\n", ["thing.prot", "there is no such setting"]),
        ("[1, 2]", ["expected a mapping"]),
        ("thing: {port: [", ["is not YAML"]),
        ("\x00", ["is not YAML"]),
    ],
)
def test_a_bad_file_is_named(text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    line = fails(["--config", str(path)], capsys)
    for word in [*words, str(path)]:
        assert word in line


@pytest.mark.parametrize("text", ["", "thing:\n", "cache: {port: 1}\n"])
def test_a_file_without_the_section_changes_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    assert load_settings(ThingSettings, ["--config", str(path)]).model_fields_set == set()


@pytest.mark.parametrize("peer", ["host:1", "10.0.0.1:65535", "[::1]:7001", "dns:///host:7001", "unix:/run/thing"])
def test_addresses_of_every_kind(peer: str) -> None:
    assert load_settings(ThingSettings, ["--peer", peer]).peer == peer


def test_explicit_fields_are_known_as_such() -> None:
    assert load_settings(ThingSettings, ["--port", "7000"]).model_fields_set == {"port"}


@pytest.mark.parametrize(
    ("peers", "addresses"),
    [
        ("host:1", ["host:1"]),
        ("host:1, [::1]:2,10.0.0.1:3", ["host:1", "[::1]:2", "10.0.0.1:3"]),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ["ipv4:10.0.0.1:1,10.0.0.2:1"]),  # one gRPC target with two addresses
    ],
)
def test_a_setting_with_several_addresses_is_split(peers: str, addresses: list[str]) -> None:
    assert split_addresses(load_settings(ThingSettings, ["--peers", peers]).peers) == addresses
