"""A real redis-server or valkey-server, from the PATH or from the folder of scripts/redis.sh, if there is one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.ports import free_port

FETCHED = Path(__file__).parents[2] / ".venv" / "redis" / "redis-server"
BINARY = shutil.which("redis-server") or shutil.which("valkey-server") or (str(FETCHED) if FETCHED.exists() else None)
START_TIMEOUT_S = 60.0

needs_redis = pytest.mark.skipif(BINARY is None, reason="no redis-server: apt-get install it, or scripts/redis.sh")


@dataclass
class RedisProcess:
    """A server on loopback that keeps its data in memory. `folder` has its log."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> RedisProcess:
        assert BINARY is not None
        libraries = FETCHED.parent / "lib"
        paths = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_LIBRARY_PATH": ":".join(paths)} if str(FETCHED) == BINARY else None,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()[-3000:]
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
