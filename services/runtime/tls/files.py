"""The certificates of one service: where they lie, what they contain, and when they have changed.

A folder of certificates has `ca.pem`, `cert.pem` and `key.pem`. A subfolder named after a service may have its own
ones: `worker/cert.pem` and `worker/key.pem` come before `cert.pem` and `key.pem`, and `worker/ca.pem` before `ca.pem`.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from services.runtime.logs import get_logger

log = get_logger(__name__)

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"
# From this many days before the end of a certificate, each read of it logs a warning.
EXPIRY_WARNING = dt.timedelta(days=14)


class TlsError(Exception):
    """Certificates that cannot be used. The message is one line and names the file."""


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """The files of one end of a connection."""

    cert: Path
    key: Path
    # The CAs that the other end's certificate may be from. Empty: the other end shows no certificate.
    cas: tuple[Path, ...]

    @classmethod
    def of(cls, folder: Path, service: str) -> TlsPaths:
        """The files of a service in a folder of certificates. They need not exist."""
        own = folder / service
        pair = own if (own / CERT).exists() or (own / KEY).exists() else folder
        ca = own / CA if (own / CA).exists() else folder / CA
        return cls(pair / CERT, pair / KEY, (ca,))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.cert, self.key, *self.cas)


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files contain, in PEM. The key is the certificate's. `ca`: empty if there are no CAs."""

    cert: bytes
    key: bytes
    ca: bytes
    expires: dt.datetime


class TlsFiles:
    """The certificates of one end of a connection, read again after they have changed. Threads may share it."""

    def __init__(self, paths: TlsPaths) -> None:
        """Raises TlsError if the files cannot be used."""
        self.paths = paths
        self._lock = threading.Lock()
        self._signature = _signature(paths)
        self._current = read(paths)
        self._trouble = ""  # why the newest files cannot be used

    def current(self) -> Certificates:
        """The newest certificates that can be used. While new files cannot be used, the log says why, and the earlier
        certificates stay: the files of a renewal may change one after the other.

        Call it before each connection. It takes some microseconds if nothing has changed."""
        with self._lock:
            signature = _signature(self.paths)
            if signature != self._signature:
                try:
                    self._current = read(self.paths)
                except TlsError as error:
                    if str(error) != self._trouble:
                        log.warning("the new certificates cannot be used; the earlier ones stay", reason=str(error))
                    self._trouble = str(error)
                else:
                    self._signature, self._trouble = signature, ""
                    log.info(
                        "certificates read again", cert=str(self.paths.cert), expires=f"{self._current.expires:%F}"
                    )
            return self._current


def read(paths: TlsPaths, now: dt.datetime | None = None) -> Certificates:
    """Read and check the files. Raises TlsError: a file is missing or no PEM, the key is another certificate's, or the
    certificate is not valid now."""
    # Takes 60 ms, and is needed only with TLS.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    now = now or dt.datetime.now(dt.UTC)
    cert, key, *cas = map(_content, paths.files)
    leaf = None
    for path, content in zip((paths.cert, *paths.cas), (cert, *cas), strict=True):
        try:
            first, *_ = x509.load_pem_x509_certificates(content)
        except ValueError as error:
            raise TlsError(f"{path}: no certificate in PEM ({_first_line(error)})") from error
        leaf = leaf or first
    assert leaf is not None
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password
        raise TlsError(f"{paths.key}: no private key in PEM without a password ({_first_line(error)})") from error
    as_bytes = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if leaf.public_key().public_bytes(*as_bytes) != private.public_key().public_bytes(*as_bytes):
        raise TlsError(f"{paths.key}: is not the key of {paths.cert}")
    starts, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if not starts <= now <= ends:
        raise TlsError(f"{paths.cert}: is valid from {starts:%F %T} to {ends:%F %T} UTC, and now it is {now:%F %T}")
    if ends - now < EXPIRY_WARNING:
        log.warning("a certificate expires soon", cert=str(paths.cert), expires=f"{ends:%F %T}")
    return Certificates(cert, key, b"\n".join(cas), ends)


def name_of(cert: bytes) -> str:
    """The first DNS name for which the certificate (in PEM) is valid; without DNS names, the first IP address. For
    `*.example.com` it is `any.example.com`. Raises TlsError."""
    from cryptography import x509

    try:
        leaf, *_ = x509.load_pem_x509_certificates(cert)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise TlsError(f"no certificate with a subject alternative name ({_first_line(error)})") from error
    found = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if not found:
        raise TlsError("a certificate without a DNS name or an IP address")
    return found[0].replace("*.", "any.", 1)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:100]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from error


def _signature(paths: TlsPaths) -> tuple[tuple[int, int, int], ...]:
    """Changes when a file is written or replaced, also through a symbolic link (as Kubernetes renews them)."""
    return tuple(_stat(path) for path in paths.files)


def _stat(path: Path) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
