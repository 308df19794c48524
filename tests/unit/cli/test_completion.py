"""`paceline completion`: what the shells complete. bash is asked for real, and so is an installed fish."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.cli.completion.main import SHELLS
from services.cli.main import USAGE, main

# Sets what bash would set for these words, and prints what the script offers for the last one.
ASK_BASH = """
set -u
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
[[ $(complete -p paceline) =~ -F\\ ([^ ]+) ]] || exit 3
"${BASH_REMATCH[1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, in a file."""
    folder = tmp_path_factory.mktemp("completion")
    paths = {}
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["completion", shell]) == 0
        paths[shell] = folder / f"paceline.{shell}"
        paths[shell].write_text(out.getvalue())
    return paths


def offered(script: Path, *words: str) -> list[str]:
    command = ["bash", "--norc", "-c", ASK_BASH, "bash", str(script), "paceline", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_every_command_of_the_help(scripts: dict[str, Path]) -> None:
    in_help = re.findall(r"^  ([a-z]+) ", USAGE, re.MULTILINE)
    assert sorted(offered(scripts["bash"], "")) == sorted(in_help)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pol"], ["policy"]),
        (["policy", "s"], ["set"]),
        (["policy", "set", "--ord"], ["--order"]),
        (["policy", "set", "vllm-v1"], ["vllm-v1", "vllm-v1-priority"]),
        (["up", "--dt"], ["--dtype"]),
        (["up", "--port", "1", "--dtype", "b"], ["bfloat16"]),
        (["up", "--preset", "sglang-"], ["sglang-lpm"]),
        (["doctor", "--js"], ["--json"]),
        (["chat", "--sys"], ["--system"]),
        (["serve", "g"], ["gateway"]),
        (["serve", "gateway", "--reasoning-p"], ["--reasoning-parser"]),
        (["worker", "--serv"], ["--server"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_commands_flags_and_values(
    scripts: dict[str, Path], words: list[str], expected: list[str]
) -> None:
    assert offered(scripts["bash"], *words) == expected


def test_bash_completes_folders_and_files(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert offered(scripts["bash"], "up", "--model", f"{tmp_path}/") == [f"{tmp_path}/folder"]
    both = offered(scripts["bash"], "up", "--config", f"{tmp_path}/f")
    assert sorted(both) == [f"{tmp_path}/file", f"{tmp_path}/folder"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_reads_its_script(scripts: dict[str, Path], shell: str) -> None:
    assert "sglang-lpm" in scripts[shell].read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_describes_what_it_completes(scripts: dict[str, Path]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    ask = f"source {scripts['fish']}; complete -C 'paceline pol'; complete -C 'paceline up --dtype b'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True, timeout=20, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["policy", "bfloat16"]


def test_an_unknown_shell_gets_one_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "ksh"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
