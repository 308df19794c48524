"""The folder of a development set: its files, and which of them a call may write."""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.cli.certs.authority import Authority, Pair
from services.runtime.tls.files import CA, CERT, KEY

CA_KEY = "ca-key.pem"
CA_LIFETIME = dt.timedelta(days=3650)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Each service, and the names under which others dial it in the compose file and its overlays.
SERVICES = {
    "cache": ("cache",),
    "scheduler": ("scheduler", "scheduler-2"),
    "worker": ("worker",),
    "gateway": ("gateway", "balancer"),
    "etcd": ("etcd",),
    "cli": ("cli",),
}


class CannotMake(Exception):
    """The folder's contents do not allow the call. The message is one line."""


def make_set(
    folder: Path,
    *,
    ca_key: Path | None = None,
    hosts: Sequence[str] = (),
    lifetime: dt.timedelta,
    renew: bool = False,
    force: bool = False,
) -> list[str]:
    """Make what is missing: the CA, and a certificate for each service. Returns the names of what was made.

    `ca_key`: the file of the CA's private key, by default in the folder. `renew`: new certificates for all services, of
    the same CA. `force`: a new CA as well. Raises CannotMake, or OSError if the folder cannot be written."""
    ca_key = ca_key or folder / CA_KEY
    paths = (folder / CA, ca_key)
    pairs = {name: (folder / name / CERT, folder / name / KEY) for name in SERVICES}
    has_pair = {name: cert.exists() or key.exists() for name, (cert, key) in pairs.items()}
    made = []
    if force or not any(path.exists() for path in paths):
        if not force and (alone := [name for name, exists in has_pair.items() if exists]):
            raise CannotMake(
                f"{folder} has certificates for {', '.join(alone)}, but not their CA; --force makes a new CA, and "
                "writes all certificates anew"
            )
        authority = Authority.make("Paceline development CA", CA_LIFETIME)
        has_pair, renew = dict.fromkeys(pairs, False), False
        _write(ca_key.parent, ca_key.name, authority.pair.key)
        _write(folder, CA, authority.pair.cert)
        made.append("CA")
    else:
        authority = _read_authority(*paths)
    for name, names in SERVICES.items():
        if has_pair[name] and not renew:
            continue
        pair = authority.issue(name, [*dict.fromkeys((*names, *LOOPBACK, *hosts))], lifetime)
        _write(folder / name, KEY, pair.key)
        _write(folder / name, CERT, pair.cert)
        _write(folder / name, CA, authority.pair.cert)
        made.append(name)
    return made


def _read_authority(cert: Path, key: Path) -> Authority:
    try:
        authority = Authority(Pair(cert.read_bytes(), key.read_bytes()))
    except OSError as error:
        raise CannotMake(f"{error.filename}: {error.strerror}; only the CA's key can sign certificates") from error
    except (ValueError, TypeError) as error:  # TypeError: the key is encrypted
        raise CannotMake(f"{cert}, {key}: {error}") from error
    if authority.expires < dt.datetime.now(dt.UTC):
        raise CannotMake(f"{cert}: expired on {authority.expires:%F}; --force makes a new CA and all certificates")
    return authority


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file that only its owner may read, atomically: a service may read it at this moment."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:  # mode 0600
        file.write(content)
    os.replace(file.name, folder / name)
