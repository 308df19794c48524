"""Certificates for tests: valid sets, certificates of another CA, and expired certificates."""

from __future__ import annotations

import datetime as dt
import json
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from services.cli.certs.authority import Authority, Pair
from services.cli.certs.folder import CA_KEY, LOOPBACK, make_set
from services.gateway.http.handshake import ServerTls
from services.runtime.tls.credentials import channel_credentials
from services.runtime.tls.files import CA, CERT, KEY, TlsFiles, TlsPaths

DAY = dt.timedelta(days=1)


def make_certificates(folder: Path) -> Path:
    """A set as `paceline certs` makes it."""
    make_set(folder, lifetime=30 * DAY)
    return folder


def authority_of(folder: Path) -> Authority:
    return Authority(Pair((folder / CA).read_bytes(), (folder / CA_KEY).read_bytes()))


def write_pair(folder: Path, pair: Pair, ca: bytes) -> Path:
    """A folder with one pair, which all services use."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((CA, ca), (KEY, pair.key), (CERT, pair.cert)):
        (folder / name).write_bytes(content)
    return folder


def issue(
    authority: Authority,
    folder: Path,
    *,
    lifetime: dt.timedelta = DAY,
    ago: dt.timedelta = dt.timedelta(0),
    trusted: bytes = b"",
    hosts: Sequence[str] = LOOPBACK,
) -> Path:
    """A folder with a pair that the CA issued this long `ago`. `trusted`: the CAs that its owner trusts (default: this
    CA)."""
    pair = authority.issue("peer", hosts, lifetime, dt.datetime.now(dt.UTC) - ago)
    return write_pair(folder, pair, trusted or authority.pair.cert)


def other_authority() -> Authority:
    return Authority.make("another CA", 30 * DAY)


def stranger(folder: Path, server: Path) -> Path:
    """A pair that another CA issued. Its owner trusts the server's CA."""
    return issue(other_authority(), folder, trusted=(server / CA).read_bytes())


def credentials(folder: Path, service: str = "cli") -> grpc.ChannelCredentials:
    """Channel credentials with certificates that are valid now."""
    return channel_credentials(TlsFiles(TlsPaths.of(folder, service)))


def raw_credentials(folder: Path) -> grpc.ChannelCredentials:
    """Credentials from any certificates, also from expired ones, which TlsFiles refuses."""
    ca, key, cert = ((folder / name).read_bytes() for name in (CA, KEY, CERT))
    return grpc.ssl_channel_credentials(ca, key, cert)


def server_tls(folder: Path, *, clients: Path | None = None, handshake_timeout_s: float = 10.0) -> ServerTls:
    """The gateway's TLS. `clients` is the CA of the certificates that clients must show."""
    own = TlsPaths.of(folder, "gateway")
    paths = TlsPaths(own.cert, own.key, (clients,) if clients is not None else ())
    return ServerTls(TlsFiles(paths), handshake_timeout_s)


def trusting(ca: Path) -> ssl.SSLContext:
    """For an HTTPS client."""
    return ssl.create_default_context(cafile=str(ca))


def ask_https(url: str, ca: Path, client: Path | None = None) -> str:
    """A short completion. `client`: a folder with the client's certificate. Raises URLError, OSError."""
    context = trusting(ca)
    if client is not None:
        context.load_cert_chain(client / CERT, client / KEY)
    body = json.dumps({"prompt": "Once there was a fox", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def serial_of(port: int, ca: Path) -> str:
    """The number of the certificate that a server with TLS shows."""
    sock = socket.create_connection(("127.0.0.1", port), 10)
    with trusting(ca).wrap_socket(sock, server_hostname="127.0.0.1") as connection:
        shown: Any = connection.getpeercert()
    return str(shown["serialNumber"])


def wait_for(holds: Callable[[], bool], log: Path | None = None, timeout_s: float = 60.0) -> None:
    """AssertionError with the log if it takes too long."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, log.read_text() if log is not None else "it took too long"
        time.sleep(0.05)
