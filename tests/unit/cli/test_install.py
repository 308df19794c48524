"""`scripts/install.py`: which build of torch it asks for, what it shows meanwhile, and its one line when it fails."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "install.py"
NO_SUCH_VERSION = "torch==0.0.1"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paceline_install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Commands:
    """Answers the commands that the script would run, and records them."""

    def __init__(self, *answers: tuple[int, list[str]]) -> None:
        self.answers = list(answers)
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str], *_: object) -> tuple[int, list[str]]:
        self.ran.append(" ".join(command))
        return self.answers.pop(0)


def choose(install: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: Commands, *, gpu: bool, torch: str) -> str:
    out = io.StringIO()
    monkeypatch.setattr(install, "run", commands)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(install, "wanted_torch", lambda: NO_SUCH_VERSION)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    install.install_torch(torch, install.Reporter(out), io.StringIO())
    return out.getvalue()


@pytest.mark.parametrize(("gpu", "torch"), [(True, "auto"), (True, "pip"), (False, "pip")])
def test_pip_chooses_torch_with_a_gpu_or_on_demand(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: bool, torch: str
) -> None:
    commands = Commands()
    choose(install, monkeypatch, commands, gpu=gpu, torch=torch)
    assert commands.ran == []


@pytest.mark.parametrize(("gpu", "torch"), [(False, "auto"), (True, "cpu")])
def test_a_wheel_of_torch_in_a_configured_folder_needs_no_network(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: bool, torch: str
) -> None:
    commands = Commands((0, []))
    choose(install, monkeypatch, commands, gpu=gpu, torch=torch)
    assert len(commands.ran) == 1
    assert "--no-index" in commands.ran[0]
    assert commands.ran[0].endswith(NO_SUCH_VERSION)


def test_without_a_gpu_uv_is_asked_for_the_cpu_build(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands((1, []), (0, []), (0, []))
    said = choose(install, monkeypatch, commands, gpu=False, torch="auto")
    assert "--torch-backend cpu" in commands.ran[2]
    assert "takes the build that its index has" not in said


def test_one_line_says_that_the_cpu_build_cannot_be_had(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["error: Request failed after 1 retries", "  cause: Failed to fetch: a page", "  cause: dns error"]
    commands = Commands((1, []), (0, []), (1, words))
    said = choose(install, monkeypatch, commands, gpu=False, torch="auto")
    assert said.splitlines()[1:] == [
        "setup: no CPU build of torch: Failed to fetch: a page: dns error; "
        "pip takes the build that its index has (with CUDA: some GB)"
    ]


def test_a_gpu_counts_if_the_driver_lists_it(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.shutil, "which", lambda *_, **__: None)
    assert not install.has_nvidia_gpu(tmp_path / "missing")
    assert not install.has_nvidia_gpu(tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    assert install.has_nvidia_gpu(tmp_path)


@pytest.mark.parametrize(
    ("script", "found"), [("echo 'GPU 0: of a test'", True), ("echo 'no devices'", False), ("exit 9", False)]
)
def test_nvidia_smi_is_asked_where_proc_has_nothing(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert install.has_nvidia_gpu(tmp_path / "missing") is found


PIP_WRITES = """\
Obtaining file:///somewhere
  Installing build dependencies: started
Collecting numpy>=1.26 (from paceline==0.1.0)
  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)
Processing /a/folder/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (from paceline==0.1.0)
Installing collected packages: numpy, torch, paceline
"""


def test_the_progress_of_pip_is_read_from_its_output(install: ModuleType) -> None:
    status = install.Status("asking")
    shown = []
    for line in PIP_WRITES.splitlines(keepends=True):
        status.read(line)
        shown.append(str(status))
    assert shown == [
        "asking",
        "preparing to build Paceline",
        "looking up numpy",
        "downloading numpy-2.4.6 (16.9 MB)",
        "2 packages found, downloading numpy-2.4.6 (16.9 MB)",
        "2 packages found, unpacking 3 packages",
    ]


@pytest.mark.parametrize(("out", "lines"), [(io.StringIO(), 8), (Terminal(), 1)])
def test_two_minutes_are_eight_lines_of_a_log_and_one_line_of_a_terminal(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, out: io.StringIO, lines: int
) -> None:
    now_s = 0.0
    monkeypatch.setattr(install.time, "monotonic", lambda: now_s)
    reporter = install.Reporter(out)
    for second in range(121):
        now_s = float(second)
        reporter.show("busy")
    reporter.say("installed")
    assert out.getvalue().count("\n") == lines + (not out.isatty())
    assert "setup: 120 s: busy" in out.getvalue()


def test_an_index_that_cannot_be_reached_is_named_in_one_line(tmp_path: Path) -> None:
    """Runs in its own environment. Its pip knows one index, at a port without a server."""
    venv.create(tmp_path, with_pip=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_CACHE_DIR": "1"}
    command: list[str | Path] = [tmp_path / "bin" / "python", SCRIPT, "--torch", "pip", ".[gateway,worker]"]
    done = subprocess.run(
        command, env=clean | offline, capture_output=True, text=True, timeout=100, check=False, cwd=SCRIPT.parent
    )
    assert done.returncode == 1
    assert done.stdout == ""
    # A busy machine takes so long that progress is reported meanwhile.
    [line] = [line for line in done.stderr.splitlines() if not re.match(r"setup: +\d+ s: ", line)]
    assert line.startswith("setup: cannot install: http://127.0.0.1:9 cannot be reached (Connection refused); ")
    assert "connection broken" in (tmp_path / "install.log").read_text()


def test_a_wrong_choice_of_torch_is_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--torch", "gpu", "."], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "setup: TORCH is auto, cpu or pip, not 'gpu'\n")
