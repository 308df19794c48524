"""A real etcd of one or several members.

Its binary is in the PATH, or where scripts/etcd.sh puts it. Without a binary, `needs_etcd` skips the test.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.runtime.tls.credentials import client_context
from services.runtime.tls.files import TlsFiles, TlsPaths
from tests.support.ports import free_port

FETCHED = Path(__file__).parents[2] / ".venv" / "etcd" / "usr" / "bin" / "etcd"
BINARY = shutil.which("etcd") or (str(FETCHED) if FETCHED.exists() else None)
START_TIMEOUT_S = 60.0

needs_etcd = pytest.mark.skipif(BINARY is None, reason="no etcd: apt-get install etcd-server, or scripts/etcd.sh")


@dataclass
class EtcdProcess:
    """A member. Keeps its data in `folder`, so that it can be killed and started again."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    name: str = "one"
    tls_dir: Path | None = None  # serve HTTPS, and demand a client certificate
    cluster: str = ""  # NAME=peer_url of every member, with commas; empty: this is the only member

    @property
    def url(self) -> str:
        return f"{'https' if self.tls_dir else 'http'}://127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self) -> EtcdProcess:
        self.launch()
        self.wait_healthy()
        return self

    def launch(self) -> None:
        """Starts the process and does not wait: a member is healthy only when most members of the cluster run."""
        assert BINARY is not None
        log = self._log.open("ab")
        self.process = subprocess.Popen(
            [
                *(BINARY, "--name", self.name, "--data-dir", str(self.folder / f"etcd-{self.name}")),
                *("--unsafe-no-fsync", "--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
                *self._tls_flags,
                *("--initial-cluster", self.cluster or f"{self.name}={self.peer_url}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        log.close()

    def wait_healthy(self) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline_s, "etcd does not get healthy"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None

    @property
    def is_leader(self) -> bool:
        """Whether this member is the leader of the etcd cluster."""
        url = f"{self.url}/v3/maintenance/status"
        with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=5) as answer:
            status = json.load(answer)
        return bool(status["leader"] == status["header"]["member_id"])

    @property
    def _log(self) -> Path:
        return self.folder / f"etcd-{self.name}.log"

    @property
    def _tls_flags(self) -> list[str]:
        if self.tls_dir is None:
            return []
        own = TlsPaths.of(self.tls_dir, "etcd")
        flags = ["--cert-file", str(own.cert), "--key-file", str(own.key), "--trusted-ca-file", str(own.cas[0])]
        return [*flags, "--client-cert-auth"]

    def _is_healthy(self) -> bool:
        context = client_context(TlsFiles(TlsPaths.of(self.tls_dir, "cli"))) if self.tls_dir else None
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1, context=context) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


def start_cluster(folder: Path, num_members: int) -> list[EtcdProcess]:
    """A cluster that survives the loss of less than half of its members."""
    members = [EtcdProcess(folder, name=f"member-{i}") for i in range(num_members)]
    for member in members:
        member.cluster = ",".join(f"{one.name}={one.peer_url}" for one in members)
        member.launch()
    for member in members:
        member.wait_healthy()
    return members
