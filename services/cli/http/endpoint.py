"""The HTTP API that a command talks to: from flags, the environment, or the state file of `paceline up`."""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.cli import api_key
from services.cli.servers import SERVER_ENV, TLS_ENV, NoAddress, Server, running_server
from services.runtime.tls.credentials import pinned_context
from services.runtime.tls.exposed import is_loopback
from services.runtime.tls.files import TlsError, TlsFiles, TlsPaths

URL_ENV = "PACELINE_URL"
# Of a gateway that is started with `paceline serve gateway`.
DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the API is, and how to connect."""

    url: str  # without /v1
    named_by: str  # a flag, a variable, a server, or "" for the default
    key: str = ""
    tls: ssl.SSLContext | None = None  # None: the CAs of the system

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, so that a proxy of the environment must not be asked."""
        return self.named_by.startswith("server ") or is_loopback(urlsplit(self.url).hostname or "")


def add_flags(parser: argparse.ArgumentParser, kind: str = "API key") -> None:
    """`kind`: the kind of key that the command needs."""
    parser.add_argument(
        "--url", help=f"of the server [env: {URL_ENV}] default: the running `paceline up`, else {DEFAULT_URL}"
    )
    parser.add_argument(
        "--server", metavar="NAME", help=f"HTTP port or model of a `paceline up` of this machine [env: {SERVER_ENV}]"
    )
    api_key.add_flag(parser, kind)
    parser.add_argument(
        "--tls-dir",
        metavar="DIR",
        help=f"folder of certificates, for --url [env: {TLS_ENV}] default: the system's CAs are trusted",
    )


def find_endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Flags come before the environment, and the environment before state files. Raises NoAddress, ValueError and
    TlsError, each with one line."""
    key = api_key.key_of(arguments)
    for url, origin, server in (
        (arguments.url, "--url", arguments.server),
        (os.environ.get(URL_ENV), URL_ENV, os.environ.get(SERVER_ENV)),
    ):
        if url:
            folder = arguments.tls_dir or os.environ.get(TLS_ENV)
            return Endpoint(_checked(url, origin), origin, key, _context_of(Path(folder)) if folder else None)
        if server:
            break
    found = running_server(arguments.server)
    if found is None:
        return Endpoint(DEFAULT_URL, "", key)
    return Endpoint(found.url or f"http://127.0.0.1:{found.port}", f"server {found}", key, _pinned(found))


def _checked(url: str, origin: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        is_valid = False
    if not is_valid:
        raise NoAddress(f"{origin}: an HTTP address like {DEFAULT_URL} is needed (got {url!r})")
    return base


def _context_of(folder: Path) -> ssl.SSLContext:
    paths = TlsPaths.of(folder, "cli")
    read = paths.cas[0].name
    try:
        context = ssl.create_default_context(cafile=paths.cas[0])
        if paths.cert.exists():  # for a server that demands certificates
            read = f"{paths.cert.name} and {paths.key.name}"
            context.load_cert_chain(paths.cert, paths.key)
    except OSError as error:  # ssl.SSLError too
        raise TlsError(f"--tls-dir {folder}: {read}: {error.strerror or error}") from error
    return context


def _pinned(server: Server) -> ssl.SSLContext | None:
    """Pins the certificate of this machine's server, as `up` does. The certificate need not name loopback addresses."""
    if not server.http_cert:
        return None
    try:
        cert = Path(server.http_cert).read_bytes()
    except OSError as error:
        raise TlsError(f"{server.http_cert}: {error.strerror}") from error
    own = TlsFiles(TlsPaths.of(Path(server.tls_dir), "cli")) if server.tls_dir else None
    return pinned_context(cert, own)
