"""smg, the router, as a process in front of one gateway."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.ports import free_port

START_TIMEOUT_S, END_TIMEOUT_S = 60.0, 20.0


class Smg:
    """smg in front of one gateway. smg treats the gateway as an engine of this runtime (`vllm` or `sglang`)."""

    def __init__(self, python: Path, grpc_port: int, runtime: str, log: Path) -> None:
        """`python`: of smg's environment. AssertionError if smg does not find the gateway healthy."""
        self.port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command: list[Any] = [
            python.parent / "smg",
            "launch",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--enable-igw",
        ]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics_port)]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            self._until(lambda: httpx.get(f"{self.url}/workers").status_code == 200)
            worker = {"url": f"grpc://127.0.0.1:{grpc_port}", "runtime_type": runtime, "connection_mode": "grpc"}
            httpx.post(f"{self.url}/workers", json=worker).raise_for_status()
            self._until(lambda: [each["is_healthy"] for each in self.workers] == [True])
            assert [each["runtime_type"] for each in self.workers] == [runtime]
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/workers").json()["workers"]
        return found

    def metric(self, name: str, label: str) -> float:
        """The sum of the lines that begin with `name` and contain `label`."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and label in line)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text(errors="replace")[-4000:])
