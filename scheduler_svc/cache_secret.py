"""The key of the hash that names cache namespaces (core/cache/namespaces.py): where a scheduler gets it from.

A restarted scheduler and a standby need the same key. Otherwise the KV that workers kept for tenants and salts is
computed again. So the key comes from `--cache-secret-file`; else from etcd, where all schedulers of an election find it
(election.py); else from a file that the first start makes for this user and machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from scheduler_svc.core.cache.namespaces import MAX_SECRET_BYTES, MIN_SECRET_BYTES
from services.runtime.logs import get_logger
from services.runtime.processes import state_folder
from services.runtime.service import CannotStart

log = get_logger(__name__)

FILE_NAME = "cache-secret"
_NEW_BYTES = 32


def new_secret() -> bytes:
    """A random secret: 256 bits, in hexadecimal digits."""
    return secrets.token_hex(_NEW_BYTES).encode()


def read_secret(path: Path, source: str = "--cache-secret-file") -> bytes:
    """The file's contents, without white space around them. Raises CannotStart, with `source` in the message."""
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise CannotStart(f"{source}: {path}: {error.strerror}") from error
    if not MIN_SECRET_BYTES <= len(found) <= MAX_SECRET_BYTES:
        limits = f"a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        raise CannotStart(f"{source}: {path} has {len(found)} bytes; {limits}")
    return found


def own_secret() -> bytes:
    """The secret of this user and machine; the first call makes its file. Without a folder to write to, a secret of
    this process alone. Raises CannotStart if the file cannot be read, or has a wrong size."""
    try:
        path = state_folder() / FILE_NAME
        if not path.exists():
            _make(path)
    except OSError as error:
        log.warning(
            "no folder to store the cache secret: after a restart, kept KV of tenants and salts is computed again "
            "(--cache-secret-file names a secret)",
            reason=str(error),
        )
        return new_secret()
    return read_secret(path, "cache secret")


def _make(path: Path) -> None:
    """Write a new secret, unless another process is faster. No reader sees a half-written file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)  # only its owner can read it
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
