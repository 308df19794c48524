"""Install Paceline with pip into the environment of this Python: visible progress, and one line when it fails.

    .venv/bin/python scripts/install.py '.[gateway,worker]'

pip alone is silent for minutes with -q, and writes hundreds of lines without -q. This script writes one line that
changes on a terminal, and a line every 15 s elsewhere. pip's own words go to `install.log` in the environment.

The default index of pip has CUDA builds of torch for Linux, some GB with their libraries. Where this machine has no
NVIDIA GPU, the script asks uv for the CPU build first: uv knows which index has it, so that no host is named here.
Only the standard library is imported: nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
UV = "uv==0.13.9"
# Seconds between two lines where there is no terminal: a first installation of two minutes writes about eight.
LINE_EVERY_S = 15.0
REDRAW_EVERY_S = 1.0
# pip tries three times. With its default of 5 retries, its error comes 7 s later if the index refuses the connection
# (measured, pip 23.2), and after twice the time if each try times out.
RETRIES = ("--retries", "2")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

_DOWNLOADING = re.compile(r"Downloading (?P<file>[^\s/]+)\.(?:whl|tar\.gz|zip) \((?P<size>[\d.]+ [kMG]?B)\)")
_CANNOT_FETCH = re.compile(r"Could not fetch URL (?P<url>\S+): (?P<reason>.*)")
_OFFLINE = re.compile(r"connection broken by|Max retries exceeded")
_CAUSES = (
    re.compile(r"\[Errno -?\d+\] ([^'\")\]]+)"),
    re.compile(r"(Tunnel connection failed: [^'\")]+)"),
    re.compile(r"\(connect timeout=([^)]*)\)"),
    re.compile(r"(\d\d\d (?:Client|Server) Error: .*?) for url"),
)


class Failed(Exception):
    """The installation cannot go on. The message is one line."""


class Status:
    """What pip is doing, from the lines that it writes."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.packages: set[str] = set()

    def read(self, line: str) -> None:
        words = line.split()
        if words[:1] == ["Collecting"] and len(words) > 1:
            name = re.split(r"[<>=!~;\[ ]", words[1])[0]
            self.packages.add(name)
            self.doing = f"looking up {name}"
        elif words[:1] == ["Processing"] and words[-1:] != ["metadata"] and len(words) > 1:
            self.packages.add(Path(words[1]).name.split("-")[0])
        elif found := _DOWNLOADING.search(line):
            self.doing = f"downloading {'-'.join(found['file'].split('-')[:2])} ({found['size']})"
        elif words[:2] == ["Installing", "collected"]:
            count = line.count(",") + 1
            self.doing = f"unpacking {count} packages" if count > 1 else "unpacking " + words[-1]
        elif line.strip().startswith("Installing build dependencies"):
            self.doing = "preparing to build Paceline"

    def __str__(self) -> str:
        return f"{len(self.packages)} packages found, {self.doing}" if len(self.packages) > 1 else self.doing


class Reporter:
    """Shows a status: one line that is written over on a terminal, else a new line every LINE_EVERY_S seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._began_s = self._last_s = time.monotonic()

    def show(self, status: object) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < (REDRAW_EVERY_S if self._terminal else LINE_EVERY_S):
            return
        self._last_s = now_s
        text = f"setup: {now_s - self._began_s:3.0f} s: {status}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=self._out, flush=True)
        else:
            print(text, file=self._out, flush=True)

    def say(self, text: str) -> None:
        erase = "\r\x1b[K" if self._terminal else ""
        print(f"{erase}setup: {text}", file=self._out, flush=True)


def run(
    command: Sequence[str], status: Status, reporter: Reporter, log: TextIO, env: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run it with its output in the log and its status shown. Returns its exit status and its lines."""
    print(f"$ {' '.join(command)}", file=log, flush=True)
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    lines: list[str] = []

    def read(stream: Iterable[str]) -> None:
        for line in stream:
            arrived.put(line)
        arrived.put(None)

    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {})},
    ) as process:
        assert process.stdout is not None
        threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                line = arrived.get(timeout=REDRAW_EVERY_S)
                if line is None:
                    break
                log.write(line)
                lines.append(line.rstrip())
                status.read(line)
            reporter.show(status)
    return process.returncode, lines


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def has_nvidia_gpu(gpus: Path = NVIDIA_GPUS) -> bool:
    """Whether the driver of this machine lists a GPU."""
    with contextlib.suppress(OSError):
        if any(gpus.iterdir()):
            return True
    # As under WSL, where the driver has no files in /proc.
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if tool is None:
        return False
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU" in answer.stdout


def wanted_torch(constraints: Path = CONSTRAINTS) -> str:
    """The pinned requirement, like `torch==1.2.3`."""
    for line in constraints.read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip().split("+")[0]
    raise Failed(f"{constraints.name} has no line torch==VERSION")


def install_torch(choice: str, reporter: Reporter, log: TextIO) -> None:
    """Install the CPU build of torch if `choice` is cpu, or if it is auto and the machine has no NVIDIA GPU.

    Otherwise, and on other systems than Linux, install() lets pip choose the build."""
    requirement = wanted_torch()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").split("+")[0] == requirement.removeprefix("torch=="):
            return
    if choice == "pip" or platform.system() != "Linux":  # elsewhere the default index has CPU builds
        return
    if choice == "auto" and has_nvidia_gpu():
        reporter.say(
            "this machine has an NVIDIA GPU: pip decides on the build of torch (CUDA: some GB; TORCH=cpu avoids it)"
        )
        return
    reporter.say("no NVIDIA GPU: looking for the CPU build of torch" if choice == "auto" else "the CPU build of torch")
    # A wheel in a folder that pip is configured with (find-links) needs no network.
    status = Status("unpacking the CPU build of torch")
    if run(pip("install", "--no-deps", "--no-index", requirement), status, reporter, log)[0] == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        status = Status("fetching uv, which knows where the CPU build of torch is")
        code, lines = run(pip("install", *RETRIES, "--no-deps", "--target", folder, UV), status, reporter, log)
        if _is_offline(lines):
            return  # install() asks the same index, and its error says what is wrong
        why = "uv cannot be fetched"
        if code == 0:
            uv = os.path.join(folder, "bin", "uv")
            install = [uv, "pip", "install", "--python", sys.executable, "--torch-backend", "cpu", "--no-deps"]
            status = Status("downloading the CPU build of torch (about 200 MB)")
            env = {"UV_HTTP_RETRIES": "1", "UV_TORCH_BACKEND": "cpu"}
            code, lines = run([*install, requirement], status, reporter, log, env)
            why = _last_cause(lines)
    if code != 0:
        reporter.say(f"no CPU build of torch: {why}; pip takes the build that its index has (with CUDA: some GB)")


def _last_cause(lines: Sequence[str]) -> str:
    """The first cause that uv names (what it wanted to do), and the last (the innermost)."""
    causes = [line.partition("cause: ")[2] for line in lines if "cause: " in line]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return ": ".join(dict.fromkeys([*causes[:1], *causes[-1:]])) or " ".join(errors[-1:]) or "uv failed"


def install(packages: str, reporter: Reporter, log: TextIO) -> None:
    """Raises Failed."""
    command = pip("install", *RETRIES, "--progress-bar", "off", "-c", str(CONSTRAINTS), "-e", packages)
    status = Status("asking the package index")
    code, lines = run(command, status, reporter, log)
    if code == 0:
        return
    if _is_offline(lines):
        raise Failed(_unreachable(lines, reporter, log))
    errors = [line.strip() for line in lines if line.lstrip(" │╰─>").startswith(("ERROR:", "error:"))]
    raise Failed(errors[-1].partition(": ")[2] if errors else f"pip ended with status {code}")


def _unreachable(lines: Sequence[str], reporter: Reporter, log: TextIO) -> str:
    """Which address pip could not reach, and why. Only a verbose pip names it, so pip is asked once more."""
    ask = pip("download", "-vv", "--retries", "0", "--no-deps", "--no-cache-dir", "--dest", tempfile.gettempdir(), UV)
    _, more = run(ask, Status("finding out what cannot be reached"), reporter, log)
    for line in more:
        if found := _CANNOT_FETCH.search(line):
            return f"{'/'.join(found['url'].split('/')[:3])} cannot be reached{_cause(found['reason'])}"
    broken = next(line for line in lines if _OFFLINE.search(line))
    return f"the package index cannot be reached{_cause(broken)}"


def _is_offline(lines: Sequence[str]) -> bool:
    return any(_OFFLINE.search(line) for line in lines)


def _cause(text: str) -> str:
    for pattern in _CAUSES:
        if found := pattern.search(text):
            return f" ({found[1]})"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", help="what `pip install -e` gets, as .[gateway,worker]")
    parser.add_argument(
        "--torch", default="auto", help="auto: the CPU build if there is no GPU; cpu: the CPU build; pip: pip decides"
    )
    arguments = parser.parse_args(argv)
    reporter, path = Reporter(sys.stderr), Path(sys.prefix) / "install.log"
    if arguments.torch not in ("auto", "cpu", "pip"):
        reporter.say(f"TORCH is auto, cpu or pip, not {arguments.torch!r}")
        return 2
    os.chdir(ROOT)
    try:
        with path.open("w", encoding="utf-8", errors="replace") as log:
            if "worker" in arguments.packages or "dev" in arguments.packages:
                install_torch(arguments.torch, reporter, log)
            install(arguments.packages, reporter, log)
    except Failed as error:
        reporter.say(f"cannot install: {error}; pip's own words are in {os.path.relpath(path)}")
        return 1
    except KeyboardInterrupt:
        reporter.say("interrupted")
        return 130
    reporter.say("installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
