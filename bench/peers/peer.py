"""A peer's benchmark as a process that stays alive, so that Paceline and the peer can be measured in turns. It reads
jobs and writes results, each as a line of JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Peer:
    """The peer's process. If its environment is missing, or after the process has ended, all answers are None, and
    `absent` says why."""

    def __init__(self, name: str, environments: Path) -> None:
        self.name = name
        self.absent = ""
        self.version: str | None = None
        self._process: subprocess.Popen[str] | None = None
        python = environments / name / "bin" / "python"
        if not python.exists():
            self.absent = f"{name}: not measured, its environment is missing; to make it: tests/peer/env.sh {name}"
            return
        script = ROOT / "bench" / "peers" / f"{name}_bench.py"
        self._process = subprocess.Popen(
            [str(python), str(script)], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.version = self.ask({"what": "version"})

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def ask(self, job: dict[str, Any]) -> Any:
        """The measurements of the peer's process; None without it."""
        if self._process is None:
            return None
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.absent = f"{self.name}: its process ended ({self._process.wait()}) at {job}"
            self._process = None
            return None
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            with self._process:  # closes both pipes, which ends the process, and waits for its end
                pass
