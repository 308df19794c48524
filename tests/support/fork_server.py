"""Starts services for tests by a fork of a process that has imported their modules (a new Python takes CPU seconds).

`ForkServers` is the tests' side. Run as a module, this file is the fork server of one service: it has imported what the
service imports, it has one thread, and it has made no gRPC object. Each service has its own fork server. So, as in a
normal start, no process has the modules of another service, and two services have different hash seeds.

A forked service differs from a new Python process (`start_python`) in these points:
- Its parent is the fork server, which ends with the tests. PACELINE_PARENT_PID names the fork server.
- /proc/<pid>/cmdline is the fork server's.
- All processes of one service have the same hash seed, as long as one pytest process starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

from services.cli.main import SERVICES

PARENT_ENV = "PACELINE_PARENT_PID"
# Variables that services read after their imports, so that a forked service may have other values than its fork server.
# (OTEL_: services import OpenTelemetry only if a variable or a setting names a collector. The last three: torch,
# FlashInfer and the worker set them when a test process imports these packages, and no service on a CPU reads them.)
READ_LATE = (
    *("PACELINE_", "PYTEST_", "OTEL_", "NO_PROXY", "XDG_STATE_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "FLASHINFER_USE_CUDA_NORM"),
)
# The longest request to fork. The environment is the largest part of a request (some 10 kB).
MAX_REQUEST_BYTES = 2**17
# What Ctrl-C does in this process: nothing if a shell has started it in the background.
INTERRUPT = signal.getsignal(signal.SIGINT)


def start_python(
    service: str, command: list[str], log: IO[bytes], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a service as a new Python process."""
    return subprocess.Popen(
        [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )


class ForkedProcess:
    """A process that a fork server started: the part of subprocess.Popen that tests use. Safe to use in any thread."""

    def __init__(self, command: list[str], channel: socket.socket) -> None:
        self.args = command
        self._channel = channel
        weakref.finalize(self, channel.close)
        self.pid = int(self._received())
        channel.recv(32)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit status, -N after signal N; None while the process runs."""
        return int(self._received()) if self._is_readable(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._is_readable(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return int(self._received())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _is_readable(self, timeout_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _received(self) -> bytes:
        """The first message in the channel, which stays there for the next call and for other threads."""
        message = self._channel.recv(32, socket.MSG_PEEK)
        if not message:
            raise RuntimeError(f"the fork server of {self.args} has ended")
        return message


ServiceProcess = subprocess.Popen[bytes] | ForkedProcess
# service, [module, argument, ...], file for stdout and stderr, environment
Start = Callable[[str, list[str], IO[bytes], dict[str, str]], ServiceProcess]


class ForkServers:
    """The fork servers of this process. They start at the first use, with the variables in `environment`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {**environment, "OMP_NUM_THREADS": "1"}
        self.folder = os.getcwd()
        self._controls: dict[str, socket.socket] = {}
        self._starting = threading.Lock()

    def start(self, service: str, command: list[str], log: IO[bytes], environment: dict[str, str]) -> ServiceProcess:
        """Fork a service, or start a new Python process if a fork would have other imports. stderr then says why."""
        if reasons := self.differences(environment):
            print(f"fork server: not used, because these differ from its own: {', '.join(reasons)}", file=sys.stderr)
            return start_python(service, command, log, environment)
        with self._starting:  # all of them, because a stack needs them all, and so they import side by side
            self._controls = self._controls or {name: self._start_server(name) for name in SERVICES}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([command, environment]).encode()
            socket.send_fds(self._controls[service], [request], [theirs.fileno(), log.fileno()])
        return ForkedProcess(command, ours)

    def differences(self, environment: dict[str, str]) -> list[str]:
        """Why a fork would be wrong: variables that imports may read, and the folder that they look in."""
        names = sorted(self.environment.keys() | environment.keys())
        differing = [name for name in names if self.environment.get(name) != environment.get(name)]
        elsewhere = ["the working directory"] if os.getcwd() != self.folder else []
        return [name for name in differing if not name.startswith(READ_LATE)] + elsewhere

    def _start_server(self, service: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), service],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self.environment,
                pass_fds=[theirs.fileno()],
            )

        def end() -> None:
            ours.close()
            process.kill()
            process.wait()

        atexit.register(end)
        return ours


@functools.cache
def quickest_start() -> Start:
    """The one ForkServers of this process; `start_python` with PACELINE_FORK_SERVER=0, and where there is no pidfd."""
    if os.environ.get("PACELINE_FORK_SERVER") == "0" or sys.platform != "linux":
        return start_python
    return ForkServers(dict(os.environ)).start


def serve(control: socket.socket) -> list[str]:
    """Fork a child for each request, and report its end. Returns only in a child: the module to run, its arguments."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    children: dict[int, tuple[int, socket.socket]] = {}  # by the child's pidfd
    while True:
        for ready, _ in poller.poll():
            if ready in children:
                pid, channel = children.pop(ready)
                report(channel, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                channel.close()
                poller.unregister(ready)
                os.close(ready)
                continue
            message, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
            if not message:  # the tests have ended
                os._exit(0)
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError("a fork of a process with several threads copies locks that stay locked")
            channel, log, server = socket.socket(fileno=fds[0]), fds[1], os.getpid()
            if pid := os.fork():
                os.close(log)
                report(channel, pid)
                pidfd = os.pidfd_open(pid)
                poller.register(pidfd, select.POLLIN)
                children[pidfd] = pid, channel
                continue
            for mine in (control, channel, *(other for _, other in children.values())):
                mine.close()
            for pidfd in children:
                os.close(pidfd)
            command, environment = json.loads(message)
            become(environment, log, server)
            return list(command)


def report(channel: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the test has dropped the process
        channel.send(str(number).encode())


def become(environment: dict[str, str], log: int, server: int) -> None:
    """In a child: take on what a new process would have."""
    signal.signal(signal.SIGINT, INTERRUPT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    if PARENT_ENV in environment:
        os.environ[PARENT_ENV] = str(server)
    # At each fork Python reseeds `random`, and here numpy is reseeded. torch has the same seed in every new process.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    # Ctrl-C goes to all processes of the terminal. The services must get it from there, not by the end of their parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings_module, _, server_module = SERVICES[sys.argv[2]]
    for name in (settings_module, server_module):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, the memory of all these objects
    module, *sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
