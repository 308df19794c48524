"""`paceline up`: runs the four services as processes of this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from services.cli.parent import PARENT_ENV
from services.cli.restarts import Restarts, describe_exit
from services.cli.servers import Announcement, announced, running_servers
from services.cli.watchdog import PROBE_EVERY_S, HealthState, Watchdog, check_health
from services.runtime.memory.available import oom_kills
from services.runtime.service import run_service
from services.runtime.settings import CONFIG_ENV, LogLevel, ServiceSettings, load_settings

# For traffic between the services of this machine. Other machines cannot connect, whatever --host is.
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
EVERY_ADDRESS = {"0.0.0.0", "::", ""}
# A worker's output line while it reads weights.
LOADING = re.compile(r"loading (?P<model>.+): (?P<percent>\d+) % of (?P<mib>\d+) MiB$")
BAR_CHARACTERS = 30
COLOURS = {"cache": "cyan", "scheduler": "magenta", "worker": "green", "gateway": "blue"}


class UpSettings(ServiceSettings, section="up"):
    """Start cache, scheduler, workers and gateway on this machine."""

    host: str = Field("127.0.0.1", description="address of the gateway; the other services stay on loopback")
    log_level: LogLevel = Field("warning", description="least severe level that the services log")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port of the gateway; 0 takes a free one")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port of the gateway")
    scheduler_port: int = Field(50051, ge=0, le=65535, description="gRPC port that workers dial")
    cache_port: int = Field(50052, ge=0, le=65535, description="gRPC port of the cache")
    metrics_port: int = Field(
        9101,
        ge=0,
        le=65535,
        description="port of the scheduler's /metrics; the next ones are the cache's and each worker's, and the "
        "gateway has its own at the HTTP port. 0 takes free ones",
    )
    model: str = Field("", description="checkpoint folder or hub name; empty: the built-in demo model")
    served_model_name: str = Field("", description="the name that clients use; empty: the folder's")
    workers: int = Field(1, ge=0, description="workers to start")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights from config.json alone")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="type of weights and KV")
    block_size: int = Field(16, ge=1, le=128, description="tokens in a KV block")
    num_blocks: int = Field(0, ge=0, description="KV blocks of each worker; 0: as memory allows")
    host_gib: float = Field(0.0, ge=0, description="host memory of each worker for preempted and evicted KV, in GiB")
    max_model_len: int = Field(0, ge=0, description="longest sequence; 0: the model's")
    window: int = Field(2, ge=1, le=8, description="steps in flight per worker")
    preset: str = Field("", description="scheduling policies, as those of a known system; empty: paceline's own")
    hang_s: float = Field(
        15.0,
        ge=0,
        description="seconds without an answer, after which a service is killed and started again; 0: never",
    )
    threads: int = Field(0, ge=0, description="torch threads of each worker; 0: cores - 1, at least 1")


@dataclass(slots=True)
class Child:
    name: str  # "worker-1"
    service: str
    flags: list[str]
    grpc: str = ""  # host:port
    restarts: Restarts = field(default_factory=lambda: Restarts(time.monotonic()))
    process: asyncio.subprocess.Process | None = None
    last_lines: list[str] = field(default_factory=list)
    killed_here: bool = False  # `up` killed the process because it did not answer
    oom_kills: int | None = None  # the kernel's count when the process started
    stays_down: bool = False


class CannotServe(Exception):
    """The services cannot start. The message says why."""


def pick_port(host: str, port: int, explicit: bool, flag: str, taken: set[int]) -> int:
    """`port` if it is free and not in `taken`; otherwise a free port, unless `explicit`. Raises CannotServe."""
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if explicit or port == 0:
                    raise CannotServe(f"--{flag}: {host}:{port} cannot be used: {error.strerror}") from error
            else:
                found = int(probe.getsockname()[1])
                if found not in taken:
                    return found
                if explicit and port != 0:
                    raise CannotServe(f"--{flag}: port {port} is already another service's")
        port = 0


def worker_names(count: int) -> list[str]:
    return [f"worker-{i + 1}" for i in range(count)]


def own_command(script: str) -> str:
    """The command that starts this program again. A new shell's PATH may not contain this environment."""
    if os.path.basename(script) != "paceline":
        return "paceline"
    relative = os.path.relpath(script)
    return relative if os.sep in relative and not relative.startswith(os.pardir) else script


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """All lines until the end of the stream, because a full pipe would stop its writer. Long lines come in pieces."""
    while True:
        try:
            raw = await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            raw = error.partial
            if not raw:
                return
        except asyncio.LimitOverrunError as error:
            raw = await stream.readexactly(error.consumed)
        yield raw.decode(errors="replace").rstrip()


class Stack:
    """The child processes, and their output for the user."""

    def __init__(self, settings: UpSettings, console: Console) -> None:
        self.settings = settings
        self.console = console
        self.children: list[Child] = []
        self.stopping = False
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self.status: Status | None = None
        # The address for a client on this machine.
        self.address = LOOPBACK if settings.host in EVERY_ADDRESS else settings.host
        taken: set[int] = set()

        def port(name: str, host: str) -> int:
            wanted, explicit, flag = getattr(settings, name), name in settings.model_fields_set, name.replace("_", "-")
            number = pick_port(host, wanted, explicit, flag, taken)
            taken.add(number)
            return number

        self.http_port = port("port", settings.host)
        self.grpc_port = port("grpc_port", settings.host)
        self.scheduler_port = port("scheduler_port", LOOPBACK)
        self.cache_port = port("cache_port", LOOPBACK)
        self.worker_ports = []
        for _ in range(settings.workers):
            self.worker_ports.append(pick_port(LOOPBACK, 0, False, "", taken))
            taken.add(self.worker_ports[-1])
        self.metrics_ports = self._pick_metrics_ports(taken)

    def _pick_metrics_ports(self, taken: set[int]) -> dict[str, int]:
        """Metrics ports by the name of the child. Raises CannotServe."""
        first, explicit = self.settings.metrics_port, "metrics_port" in self.settings.model_fields_set
        ports: dict[str, int] = {}
        for offset, name in enumerate(["scheduler", "cache", *worker_names(self.settings.workers)]):
            wanted = first + offset if first else 0
            if wanted > MAX_PORT:
                raise CannotServe(f"--metrics-port: {name} would get port {wanted}; {MAX_PORT} is the highest")
            ports[name] = pick_port(LOOPBACK, wanted, explicit, "metrics-port", taken)
            taken.add(ports[name])
        return ports

    def metrics_urls(self) -> dict[str, str]:
        """Metrics URLs by the name of the child."""
        inside = {name: f"http://{LOOPBACK}:{port}/metrics" for name, port in self.metrics_ports.items()}
        return {"gateway": f"{self.url}/metrics"} | inside

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.http_port}"

    def plan(self) -> list[Child]:
        """The services, in the order of their start."""
        s = self.settings
        common = ["--log-level", s.log_level, "--drain-s", str(s.drain_s)]
        # The services write to a pipe, and only `up` knows whether it writes to a terminal.
        log_format = "human" if s.log_format == "auto" and self.console.is_terminal else s.log_format
        common += ["--log-format", log_format]

        def inside(name: str) -> list[str]:
            return [*common, "--host", LOOPBACK, "--metrics-port", str(self.metrics_ports[name])]

        cache_at, scheduler_at = f"{LOOPBACK}:{self.cache_port}", f"{LOOPBACK}:{self.scheduler_port}"
        dial = ["--scheduler", scheduler_at]
        cache = [*inside("cache"), "--port", str(self.cache_port)]
        scheduler = [*inside("scheduler"), "--port", str(self.scheduler_port), "--cache", cache_at]
        scheduler += self._chosen("window", "preset")
        worker = [*dial, *self._chosen("model", "load_format", "dtype", "block_size", "num_blocks")]
        worker += self._chosen("host_gib", "max_model_len", "threads")
        gateway = [*common, *dial, "--host", s.host, "--port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        gateway += self._chosen("model", "served_model_name", "max_model_len", "dtype")
        return [
            Child("cache", "cache", cache, cache_at),
            Child("scheduler", "scheduler", scheduler, scheduler_at),
            *[
                Child(name, "worker", [*inside(name), *worker, "--port", str(port)], f"{LOOPBACK}:{port}")
                for name, port in zip(worker_names(s.workers), self.worker_ports, strict=True)
            ],
            Child("gateway", "gateway", gateway, f"{self.address}:{self.grpc_port}"),
        ]

    def _chosen(self, *names: str) -> list[str]:
        """Flags for the values that the user chose for `up`. Other values come from the service's own settings."""
        flags = []
        for name in names:
            value = getattr(self.settings, name)
            if name in self.settings.model_fields_set and value not in ("", 0):
                flags += [f"--{name.replace('_', '-')}", str(value)]
        return flags

    def environment(self) -> dict[str, str]:
        """The environment of the services."""
        file = self.settings.config_file
        config = {CONFIG_ENV: os.path.abspath(file)} if file else {}
        return {**os.environ, **config, PARENT_ENV: str(os.getpid())}

    def say(self, child: Child, line: str) -> None:
        self.console.print(f"[{COLOURS[child.service]}]{child.name:>10}[/] {line}", highlight=False, soft_wrap=True)

    def say_of(self, child: Child, line: str) -> None:
        """Show a line of the child. On a terminal, the progress of a load is a bar. A JSON line names its service, and
        stays unchanged for programs."""
        if line.startswith('{"timestamp":'):
            self.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
            return
        loading = LOADING.match(line)
        if loading is None or self.status is None or not self.console.is_terminal:
            self.say(child, escape(line))
            return
        done = BAR_CHARACTERS * int(loading["percent"]) // 100
        bar = f"[green]{'━' * done}[/][dim]{'━' * (BAR_CHARACTERS - done)}[/]"
        self.status.update(f"{child.name}: loading {bar} {loading['percent']} % of {loading['mib']} MiB")

    async def start(self) -> None:
        for child in self.plan():
            self.children.append(child)
            await self._spawn(child)
            self._tasks.append(asyncio.create_task(self._watch(child)))
            self._tasks.append(asyncio.create_task(self._guard(child)))

    async def _spawn(self, child: Child) -> None:
        child.restarts.started_s = time.monotonic()
        child.last_lines, child.killed_here, child.oom_kills = [], False, oom_kills()
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.cli", "serve", child.service, *child.flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self.environment(),
            start_new_session=True,  # Ctrl-C goes to `up`, which stops the services in order
        )

    async def _watch(self, child: Child) -> None:
        """Show the child's output, and start the child again after its end, as long as a new start can help."""
        while True:
            assert child.process is not None
            assert child.process.stdout is not None
            async for line in lines_of(child.process.stdout):
                child.last_lines = [*child.last_lines[-9:], line]
                self.say_of(child, line)
            status = await child.process.wait()
            if self.stopping:
                return
            wait_s = child.restarts.after_exit(status, time.monotonic())
            why = _why_ended(child, status)
            if wait_s is None:
                await self._give_up(child, why)
                return
            self.say(child, f"[yellow]{escape(why)}; starts again in {wait_s:.1f} s[/]")
            await asyncio.sleep(wait_s)
            if self.stopping:
                return
            await self._spawn(child)

    async def _give_up(self, child: Child, why: str) -> None:
        """Do not start the child again. The other services continue if the child is a worker and another one is
        left."""
        child.stays_down = True
        workers = [other for other in self.children if other.service == "worker"]
        is_missed = child.service != "worker" or all(worker.stays_down for worker in workers)
        # A worker of another machine may serve.
        if is_missed and not (child.service == "worker" and await asyncio.to_thread(self._ready)):
            if not self.failure.done():
                self.failure.set_result(f"{child.name} {why}")
            return
        self.say(child, f"[red]{escape(why)}; it stays down[/]")

    def _note_ready(self, child: Child) -> None:
        if not child.restarts.was_ready:
            child.restarts.was_ready = True
            self.say(child, "[green]ready[/]")

    async def _guard(self, child: Child) -> None:
        """Note when the child is ready, and kill it when it hangs. Then `_watch` starts it again."""
        process, watchdog, clock = None, Watchdog(0), time.monotonic
        last_s = clock()
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            if child.process is not process:
                process, watchdog = child.process, Watchdog(self.settings.hang_s)
            health = await check_health(child.grpc)
            if health is HealthState.SERVING and child.service == "worker":
                self._note_ready(child)
            answered = health is not HealthState.SILENT
            seconds, last_s = clock() - last_s, clock()
            if watchdog.probed(answered, seconds) and child.process is process and not self.stopping:
                assert process is not None
                if process.returncode is None:
                    self.say(child, f"[red]has answered no health check for {self.settings.hang_s:g} s; killed[/]")
                    child.killed_here = True
                    process.kill()
                    await process.wait()

    async def wait_ready(self) -> str:
        """Wait until the gateway can serve, and return the model's name. Reports each service that becomes ready."""
        pending = {
            "cache": (LOOPBACK, self.cache_port),
            "scheduler": (LOOPBACK, self.scheduler_port),
            "gateway": (self.address, self.http_port),
        }
        by_name = {child.name: child for child in self.children}
        while True:
            for name, (host, port) in list(pending.items()):
                if await _listens(host, port):
                    del pending[name]
                    by_name[name].restarts.was_ready = True
                    self.say(by_name[name], f"[green]ready[/] on {host}:{port}")
            if not pending and (self.settings.workers == 0 or await asyncio.to_thread(self._ready)):
                for child in self.children:
                    if child.service == "worker" and await check_health(child.grpc) is HealthState.SERVING:
                        self._note_ready(child)
                return await asyncio.to_thread(self._model_name)
            await asyncio.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _model_name(self) -> str:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
            return str(json.load(answer)["data"][0]["id"])

    @contextlib.contextmanager
    def announced(self) -> Iterator[Announcement | None]:
        """Announce the server to other commands of this machine. A read-only folder is no error."""
        scheduler, cache = f"{LOOPBACK}:{self.scheduler_port}", f"{LOOPBACK}:{self.cache_port}"
        with contextlib.ExitStack() as stack:
            found = announced(self.http_port, self.settings.served_model_name, scheduler, cache)
            try:
                announcement = stack.enter_context(found)
            except OSError as error:
                self.console.print(
                    f"other commands need --scheduler {scheduler}: no state file ({error})", markup=False
                )
                announcement = None
            yield announcement

    def show(self, model: str) -> None:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is 3 + 4?"}]})
        self.console.print(
            f"\n[bold green]Paceline serves {escape(model)}[/] at [bold]{self.url}/v1[/]", highlight=False
        )
        self.console.print(f"  gRPC at {self.address}:{self.grpc_port}. Try:\n", highlight=False)
        example = f"curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'"
        self.console.print(f"  {escape(example)}\n", highlight=False, soft_wrap=True)
        self.console.print("  Metrics:", highlight=False)
        for name, url in self.metrics_urls().items():
            self.console.print(f"    {name:<10} {url}", highlight=False, soft_wrap=True)
        if self.settings.workers == 0:
            said = "No worker was started: nothing is computed until a worker joins."
            self.console.print(f"  [yellow]{said}[/]", highlight=False)
        # The settings that the scheduler requires to be equal.
        same = self._chosen("model", "load_format", "dtype", "block_size", "max_model_len")
        more = [own_command(sys.argv[0]), "worker", "--scheduler", f"{LOOPBACK}:{self.scheduler_port}", *same]
        self.console.print(f"  One more worker: [bold]{escape(shlex.join(more))}[/]", highlight=False, soft_wrap=True)
        if len(running_servers()) > 1:
            line = f"  Other servers run here: paceline policy, cache and explain need --server {self.http_port}."
            self.console.print(line, highlight=False, soft_wrap=True)
        self.console.print("  Ctrl-C drains and stops.\n", highlight=False)

    async def stop(self) -> None:
        """Stop the gateway first, so that running requests can end; then workers, scheduler and cache."""
        self.stopping = True
        for services in (["gateway"], ["worker"], ["scheduler"], ["cache"]):
            going = [child for child in self.children if child.service in services]
            await asyncio.gather(*(self._end(child) for child in going))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.settings.drain_s + 5)
        except TimeoutError:
            self.say(child, "[red]did not stop; killed[/]")
            process.kill()
            await process.wait()


def _why_ended(child: Child, status: int) -> str:
    now, before = oom_kills(), child.oom_kills
    killed = now - before if now is not None and before is not None else None
    return describe_exit(status, child.last_lines, killed, child.killed_here)


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def run(settings: UpSettings, stop: asyncio.Event, console: Console) -> str | None:
    """Serve until `stop`. Returns the reason if serving is impossible."""
    try:
        stack = Stack(settings, console)
    except CannotServe as error:
        return str(error)
    with stack.announced() as announcement:
        return await _serve(stack, stop, announcement)


async def _serve(stack: Stack, stop: asyncio.Event, announcement: Announcement | None) -> str | None:
    console, failed = stack.console, stack.failure
    stopped = asyncio.create_task(stop.wait())
    try:
        with console.status("starting", spinner="dots") as stack.status:
            await stack.start()
            ready = asyncio.create_task(stack.wait_ready())
            await _first(ready, stopped, failed)
        if ready.done():
            if announcement is not None:
                announcement.rename(ready.result())
            stack.show(ready.result())
            await _first(stopped, failed)
        else:
            ready.cancel()
    finally:
        console.print("stopping: running requests get to end" if not failed.done() else "stopping")
        await stack.stop()
        stopped.cancel()
    return failed.result() if failed.done() else None


def main(argv: list[str]) -> int:
    settings = load_settings(UpSettings, argv, prog="paceline up")
    console = Console(stderr=False)
    problem: list[str] = []

    async def body(stop: asyncio.Event) -> None:
        if (reason := await run(settings, stop, console)) is not None:
            problem.append(reason)

    run_service(body)
    for reason in problem:
        print(f"paceline up: {reason}", file=sys.stderr)
    return 1 if problem else 0
