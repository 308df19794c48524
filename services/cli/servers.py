"""Finds a running server for a command: from flags, then the environment, then the state file of `paceline up`.

Each `paceline up` writes a file, named after its HTTP port, in $XDG_STATE_HOME/paceline/servers (~/.local/state by
default), and removes it at its end. A file counts only while the process that wrote it runs. So the file of a killed
process, or from before a reboot, is ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from services.cli import api_key
from services.cli.arguments import Parser
from services.runtime.processes import machine, started, state_folder
from services.runtime.settings import Address
from services.runtime.tls.files import TlsFiles, TlsPaths

Service = Literal["scheduler", "cache"]
# Ports of services that are started one by one with `paceline serve`.
DEFAULT_ADDRESSES: dict[Service, str] = {"scheduler": "127.0.0.1:50051", "cache": "127.0.0.1:50052"}
SERVER_ENV = "PACELINE_SERVER"
TLS_ENV = "PACELINE_TLS_DIR"


class NoAddress(Exception):
    """No server, or several servers, fit the command, or an address is malformed. The message is one line."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running `paceline up`, as described by its state file."""

    port: int  # HTTP
    model: str
    scheduler: str
    cache: str
    pid: int
    started: str  # kernel ticks; a later process with the same pid has another value
    machine: str  # boot and pid namespace, within which a pid is unique
    tls_dir: str = ""  # absolute; empty: without TLS
    url: str = ""  # of the gateway, for a client on this machine
    http_cert: str = ""  # absolute path of the certificate that the gateway shows to clients; empty: without TLS

    def __str__(self) -> str:
        return f"{self.port} ({self.model})" if self.model else f"{self.port}"

    @property
    def runs(self) -> bool:
        return self.machine == machine() and started(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a service, and its origin: a flag, a variable, a server, or "" for a default."""

    service: Service
    address: str
    named_by: str
    tls_dir: str = ""  # of a server


def add_flags(parser: argparse.ArgumentParser, service: Service) -> None:
    default = f"default: the running `paceline up`, else {DEFAULT_ADDRESSES[service]}"
    parser.add_argument(f"--{service}", metavar="HOST:PORT", help=f"[env: {_env_name(service)}] {default}")
    parser.add_argument(
        "--server", metavar="NAME", help=f"HTTP port or model of a `paceline up` of this machine [env: {SERVER_ENV}]"
    )
    api_key.add_flag(parser)
    parser.add_argument(
        "--tls-dir",
        metavar="DIR",
        help=f"folder of certificates [env: {TLS_ENV}] default: that of the running `paceline up`",
    )


def certificates_for(arguments: argparse.Namespace, target: Target) -> TlsFiles | None:
    """What to dial the target with. None: without TLS. Raises TlsError."""
    folder = arguments.tls_dir or os.environ.get(TLS_ENV) or target.tls_dir
    return TlsFiles(TlsPaths.of(Path(folder), "cli")) if folder else None


def take_server_flag(prog: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse --server, for target_of(). Also returns the other arguments."""
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--server")
    parser.set_defaults(scheduler=None)
    return parser.parse_known_args(argv)


def target_of(arguments: argparse.Namespace, service: Service) -> Target:
    """The address to dial. Flags come before the environment, and the environment before state files. Raises
    NoAddress."""
    environment = os.environ.get
    for address, origin, server, server_origin in (
        (getattr(arguments, service), f"--{service}", arguments.server, "--server"),
        (environment(_env_name(service)), _env_name(service), environment(SERVER_ENV), SERVER_ENV),
    ):
        if address:
            return Target(service, _checked(address, origin), origin)
        if server:
            return _target(service, _named(server, server_origin))
    running = _only_server()
    return _target(service, running) if running else Target(service, DEFAULT_ADDRESSES[service], "")


def running_server(name: str | None) -> Server | None:
    """The running `paceline up` of --server, of the environment, or the only one. None if none runs. Raises
    NoAddress."""
    for given, origin in ((name, "--server"), (os.environ.get(SERVER_ENV), SERVER_ENV)):
        if given:
            return _named(given, origin)
    return _only_server()


def _only_server() -> Server | None:
    """None if no server runs. Raises NoAddress if several run."""
    running = running_servers()
    if len(running) > 1:
        raise NoAddress(f"{len(running)} servers run here: {_listed(running)}; choose one with --server, like "
                        f"--server {running[0].port}, or with {SERVER_ENV}")  # fmt: skip
    return running[0] if running else None


def server_of(name: str | None) -> Server:
    """The server that --server names, else the environment, else the only one. Raises NoAddress."""
    for value, origin in ((name, "--server"), (os.environ.get(SERVER_ENV), SERVER_ENV)):
        if value:
            return _named(value, origin)
    running = running_servers()
    if len(running) != 1:
        found = f"{len(running)} servers run here: {_listed(running)}" if running else "no `paceline up` runs here"
        raise NoAddress(found)
    return running[0]


def running_servers() -> list[Server]:
    """The servers of this machine and user, by port. Unreadable files are skipped."""
    try:
        found = [_read(path) for path in _folder().glob("*.json")]
    except OSError:
        return []
    return sorted((server for server in found if server is not None and server.runs), key=lambda server: server.port)


@contextlib.contextmanager
def announced(
    port: int, model: str, scheduler: str, cache: str, tls_dir: str = "", url: str = "", http_cert: str = ""
) -> Iterator[Announcement]:
    """Announce this process as a server while the block runs. Raises OSError before the block."""
    pid = os.getpid()
    server = Server(port, model, scheduler, cache, pid, started(pid), machine(), tls_dir, url, http_cert)
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        # A file of another boot or container stays: this process cannot find out whether that server still runs.
        if (old := _read(path)) is not None and old.machine == server.machine and not old.runs:
            path.unlink(missing_ok=True)
    announcement = Announcement(server, folder / f"{port}.json")
    announcement.write()
    try:
        yield announcement
    finally:
        announcement.remove()


class Announcement:
    """The state file of a running `paceline up`."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self._path = path

    def rename(self, model: str) -> None:
        """Write the model's name, now that it is known."""
        self.server = replace(self.server, model=model)
        with contextlib.suppress(OSError):  # a full disk: the old file is good enough
            self.write()

    def write(self) -> None:
        """Write the file atomically, so that no reader sees a part of it."""
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="utf-8") as file:
            json.dump(asdict(self.server), file)
        os.replace(file.name, self._path)

    def remove(self) -> None:
        if _read(self._path) == self.server:  # otherwise the file belongs to another server by now
            self._path.unlink(missing_ok=True)


def _folder() -> Path:
    """The folder of the state files. Raises OSError if the user has no home."""
    return state_folder() / "servers"


def _read(path: Path) -> Server | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
        # A file of an earlier version has fewer fields.
        known = {"tls_dir": "", "url": "", "http_cert": "", **values}
        return TypeAdapter(Server).validate_python({field.name: known[field.name] for field in fields(Server)})
    except (OSError, ValueError, KeyError, TypeError):  # ValidationError is a ValueError
        return None


def _named(name: str, origin: str) -> Server:
    running = running_servers()
    matching = [server for server in running if name in (str(server.port), server.model)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NoAddress(f"{origin}: {len(matching)} servers have this name: {_listed(matching)}; give a port")
    there = f"there are {_listed(running)}" if running else "no `paceline up` runs here"
    raise NoAddress(f"{origin}: there is no server {name!r}; {there}")


def _target(service: Service, server: Server) -> Target:
    return Target(service, getattr(server, service), f"server {server}", server.tls_dir)


def _listed(servers: list[Server]) -> str:
    return ", ".join(map(str, servers))


def _checked(address: str, origin: str) -> str:
    try:
        checked: str = TypeAdapter(Address).validate_python(address)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise NoAddress(f"{origin}: {message} (got {address!r})") from error
    return checked


def _env_name(service: Service) -> str:
    return f"PACELINE_{service.upper()}"
