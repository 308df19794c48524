"""`paceline keys`, and the key that a command sends."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from services.cli.api_key import with_key
from services.cli.main import main
from services.runtime.keys.entries import hash_of, parse_keys


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(["keys", *argv])
    except SystemExit as end:
        status = int(str(end.code))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_new_prints_a_key_and_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "new", "alice", "--tenant", "acme", "--max-requests", "3", "--admin")
    assert status == 0
    (secret,) = (line for line in out.splitlines() if line.startswith("pl-"))
    (key,) = parse_keys(out[out.index("[keys.") :])
    assert (key.name, key.tenant, key.max_requests, key.admin) == ("alice", "acme", 3, True)
    assert key.sha256 == hash_of(secret)


def test_new_adds_to_a_file_and_prints_only_the_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secrets = [run(capsys, "new", name, "--file", str(path))[1].strip() for name in ("a", "b.c")]
    path.chmod(0o640)
    path.write_text("# of our team\n" + path.read_text())
    secrets.append(run(capsys, "new", "d", "--file", str(path), "--any-tenant")[1].strip())
    assert [key.name for key in parse_keys(path.read_text())] == ["a", "b.c", "d"]
    assert [key.sha256 for key in parse_keys(path.read_text())] == [hash_of(secret) for secret in secrets]
    assert path.read_text().startswith("# of our team\n")
    assert path.stat().st_mode & 0o777 == 0o640
    assert [found.name for found in tmp_path.iterdir()] == ["keys.toml"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a b"], "a name has 1 to 64 letters"),
        (["x", "--max-requests", "0"], "keys.x.max_requests: input should be greater"),
        (["x", "--max-priority", "nan"], "keys.x.max_priority: must be a number"),
        (["x", "--tenant", "t" * 129], "keys.x.tenant: string should have at most 128 characters"),
        (["x", "--file", "/nowhere/keys.toml"], "No such file or directory"),
    ],
)
def test_a_wrong_key_is_refused_with_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    status, out, err = run(capsys, "new", *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_name_that_is_taken_changes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    run(capsys, "new", "a", "--file", str(path))
    before = path.read_text()
    assert run(capsys, "new", "a", "--file", str(path))[0] == 2
    assert path.read_text() == before


def test_check_shows_the_keys_but_no_hash(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    run(capsys, "new", "alice", "--file", str(path), "--admin", "--tokens-per-minute", "5000", "--max-priority", "7")
    monkeypatch.setenv("PACELINE_KEYS_FILE", str(path))
    status, out, _ = run(capsys, "check")
    assert status == 0
    for word in ("alice", "admin", "5000", "7"):
        assert word in out
    assert parse_keys(path.read_text())[0].sha256 not in out
    path.write_text("[keys.a]\nsha256 = 'x'\n")
    status, _, err = run(capsys, "check", str(path))
    assert (status, err.count("\n")) == (2, 1)
    assert "keys.a.sha256" in err


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with (
        grpc.insecure_channel("127.0.0.1:1") as channel,
        pytest.raises(ValueError, match=r"--api-key .or PACELINE_API_KEY.: a key has printable ASCII"),
    ):
        with_key(channel, argparse.Namespace(api_key="a\nb"))


def test_the_key_file_of_up_reaches_the_services_and_a_wrong_one_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[keys.a]\nsha256 = 'x'\n")
    argv = [sys.executable, "-m", "services.cli", "up", "--port", "0", "--keys-file", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"paceline up: --keys-file {path}: keys.a.sha256")
