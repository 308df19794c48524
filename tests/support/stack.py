"""The four services as real processes on loopback, each of which a test may kill and start again."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.asking import Gateway
from tests.support.fork_server import ServiceProcess, Start, start_python
from tests.support.ports import free_port
from tests.support.proxy import Proxy

# How `Stack` starts a process. Tests set `quickest_start()`; measurements need processes that start like a user's.
start_process: Start = start_python

START_TIMEOUT_S, END_TIMEOUT_S = 200.0, 100.0


@dataclass
class Stack:
    """Start with `up()`; `kill(name)` and `start(name)` for faults. Logs go to `folder`."""

    folder: Path
    model: str = ""
    worker_flags: list[str] = field(default_factory=list)
    scheduler_flags: list[str] = field(default_factory=list)
    gateway_flags: list[str] = field(default_factory=list)
    cache_flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    # Tests set other modules here to plant faults.
    module: str = "services.cli"
    worker_module: str = ""
    scheduler_module: str = ""
    tls_dir: Path | None = None  # certificates of all services
    # The scheduler dials the cache, and workers and gateways dial the scheduler, each through a proxy of its own:
    # `links`, by the name of the service that dials. (A gateway's connection to the cache has no proxy.)
    proxied: bool = False

    def __post_init__(self) -> None:
        self.http_port, self.grpc_port, self.scheduler_port, self.cache_port = (free_port() for _ in range(4))
        self.metrics_ports = {name: free_port() for name in ("scheduler", "cache", "worker-1")}
        self.processes: dict[str, ServiceProcess] = {}
        self.links: dict[str, Proxy] = {}
        self.url = self._url(self.http_port)
        # HTTP and gRPC port of each gateway; the code that starts further ones adds theirs.
        self.gateway_ports = {"gateway": (self.http_port, self.grpc_port)}

    @property
    def gateways(self) -> list[Gateway]:
        ports = self.gateway_ports.values()
        return [Gateway(self._url(http), f"127.0.0.1:{grpc}") for http, grpc in ports]

    @property
    def scheduler(self) -> str:
        return f"127.0.0.1:{self.scheduler_port}"

    def dialled(self, name: str) -> str:
        """The address that the service dials: for the scheduler the cache's, for others the scheduler's."""
        port = self.cache_port if name == "scheduler" else self.scheduler_port
        if self.proxied:
            if name not in self.links:
                self.links[name] = Proxy(port)
            port = self.links[name].port
        return f"127.0.0.1:{port}"

    def flags(self, name: str) -> list[str]:
        model = ["--model", self.model] if self.model else []
        if name.startswith("worker"):
            metrics = ["--metrics-port", str(self.metrics_ports.get(name, 0))]
            dial = ["--scheduler", self.dialled(name), "--name", name]
            return [*dial, *metrics, *model, *(self.worker_flags or ["--threads", "1"])]
        if name.startswith("gateway"):
            http_port, grpc_port = self.gateway_ports[name]
            ports = ["--port", str(http_port), "--grpc-port", str(grpc_port)]
            cache = ["--cache", f"127.0.0.1:{self.cache_port}"]
            return [*ports, "--scheduler", self.dialled(name), *cache, *model, *self.gateway_flags]
        if name == "scheduler":
            ports = ["--port", str(self.scheduler_port), "--metrics-port", str(self.metrics_ports[name])]
            return [*ports, "--cache", self.dialled(name), *self.scheduler_flags]
        return ["--port", str(self.cache_port), "--metrics-port", str(self.metrics_ports[name]), *self.cache_flags]

    def start(self, name: str) -> None:
        service = name.partition("-")[0]  # worker-1, gateway-2
        modules = {"worker": self.worker_module, "scheduler": self.scheduler_module}
        module = modules.get(service) or self.module
        tls = ["--tls-dir", str(self.tls_dir)] if self.tls_dir else []
        command = [module, "serve", service, "--drain-s", "60", *tls, *self.flags(name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_PARENT_PID": str(os.getpid())}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = start_process(service, command, log, {**environment, **self.environment})

    def up(self, workers: int = 1) -> Stack:
        for name in ("cache", "scheduler", *(f"worker-{i + 1}" for i in range(workers)), "gateway"):
            self.start(name)
        self.wait_ready()
        self.wait_metric("paceline_scheduler_num_workers", workers)
        return self

    def start_gateway(self, name: str) -> str:
        """One more gateway, ready; returns its URL."""
        self.gateway_ports[name] = free_port(), free_port()
        self.start(name)
        url = self._url(self.gateway_ports[name][0])
        self.wait_ready(url)
        return url

    def wait_ready(self, url: str = "") -> None:
        self._wait(lambda: self._get(f"{url or self.url}/ready")[0] == 200, "/ready")

    def wait_metric(self, name: str, value: float, timeout_s: float = START_TIMEOUT_S, of: str = "scheduler") -> None:
        self._wait(lambda: self.metric(name, of) == value, f"{name} = {value}", timeout_s)

    def wait_total(self, name: str, labels: str, value: float, of: str) -> None:
        self._wait(lambda: self.total(name, labels, of) == value, f"{name} of {labels} = {value}")

    def metric(self, name: str, of: str = "scheduler") -> float | None:
        """The sum of a service's series of this name. None if there is no such series, or the service does not answer.
        `name` may be one series, with labels."""
        status, text = self._get(f"http://127.0.0.1:{self.metrics_ports[of]}/metrics")
        values = [line.split()[-1] for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(map(float, values)) if status == 200 and values else None

    def total(self, name: str, labels: str, of: str) -> float:
        """The sum of a service's series with this name and these labels; infinite while the service does not answer."""
        status, text = self._get(f"http://127.0.0.1:{self.metrics_ports[of]}/metrics")
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and labels in line]
        return sum(float(line.split()[-1]) for line in lines) if status == 200 else float("inf")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send the signal and wait for the end of the process. AssertionError if it takes too long."""
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{name} did not end within {END_TIMEOUT_S:.0f} s\n{self.logs()}") from None

    def down(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        for link in self.links.values():
            link.close()

    def logs(self) -> str:
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return
            # A copy, because a test may start and kill processes on another thread meanwhile.
            for name, process in list(self.processes.items()):
                if process.poll() not in (None, 0):
                    raise AssertionError(f"{name} ended with {process.returncode} before {what}\n{self.logs()}")
            time.sleep(0.05)
        raise AssertionError(f"no {what} in {timeout_s} s\n{self.logs()}")

    def _url(self, port: int) -> str:
        return f"{'https' if self.tls_dir else 'http'}://127.0.0.1:{port}"

    def _get(self, url: str) -> tuple[int, str]:
        context = ssl.create_default_context(cafile=str(self.tls_dir / "ca.pem")) if self.tls_dir else None
        try:
            with urllib.request.urlopen(url, timeout=20, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except (OSError, http.client.HTTPException):  # also if the service ends in the middle of its answer
            return 0, ""
