"""Where keys come from: a file that may change, and the environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from services.runtime.keys.entries import (
    MAX_FILE_BYTES,
    ApiKey,
    InvalidKeys,
    check_distinct,
    hash_of,
    make_key,
    parse_keys,
)
from services.runtime.keys.keyring import MAX_SECRET_CHARS, Keyring
from services.runtime.logs import get_logger
from services.runtime.service import CannotStart

_log = get_logger(__name__)

FILE_ENV = "PACELINE_KEYS_FILE"
KEYS_ENV, ADMIN_KEYS_ENV = "PACELINE_API_KEYS", "PACELINE_ADMIN_KEYS"
# People choose the keys of the environment. A short key could be guessed.
MIN_SECRET_CHARS = 16
# A changed file is read when it has stayed the same for one interval, so that no half-written file is read.
LOOK_S = 0.5

_Stamp = tuple[int, ...]  # of a file; changes when the file changes


class KeySource:
    """The keys in force: `current`, and `watch` for changes of the file."""

    def __init__(self, path: Path | None, from_environment: list[ApiKey]) -> None:
        """Read the file. Raises InvalidKeys or OSError."""
        self._path = path
        self._from_environment = from_environment
        self._read_stamp = self._seen_stamp = _stamp(path) if path is not None else None
        self.current = self._read()

    @property
    def origin(self) -> str:
        """Where the keys come from, for the log."""
        return str(self._path) if self._path is not None else f"{KEYS_ENV}, {ADMIN_KEYS_ENV}"

    def look(self) -> None:
        """Read the file again if it has changed. If the new file is invalid, the old keys stay in force.

        Call this every LOOK_S. It does file I/O.
        """
        if self._path is None:
            return
        stamp = _stamp(self._path)
        is_settled, self._seen_stamp = stamp == self._seen_stamp, stamp
        if not is_settled or stamp == self._read_stamp:
            return
        self._read_stamp = stamp
        try:
            new = self._read()
        except (InvalidKeys, OSError) as error:
            _log.error("key file refused; the old keys stay in force", file=str(self._path), error=_reason(error))
            return
        before, now = ({key.name for key in ring.keys} for ring in (self.current, new))
        self.current = new
        _log.info("keys changed", keys=len(now), added=sorted(now - before), removed=sorted(before - now))

    async def watch(self) -> NoReturn:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def _read(self) -> Keyring:
        keys = parse_keys(_read_text(self._path)) if self._path is not None else []
        return Keyring(check_distinct([*keys, *self._from_environment]))


def open_keys(path: str | None, environment: Mapping[str, str] = os.environ) -> KeySource | None:
    """The keys that are configured, None if there are none. Raises CannotStart."""
    try:
        from_environment = keys_from(environment)
        if not path and not from_environment:
            return None
        return KeySource(Path(path).expanduser() if path else None, from_environment)
    except (InvalidKeys, OSError) as error:
        where = f"--keys-file {path}: " if path else ""
        raise CannotStart(f"{where}{_reason(error)}") from error


def are_configured(path: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a server with these settings has keys."""
    return bool(path or environment.get(KEYS_ENV) or environment.get(ADMIN_KEYS_ENV))


def keys_from(environment: Mapping[str, str]) -> list[ApiKey]:
    """The keys in PACELINE_API_KEYS and PACELINE_ADMIN_KEYS, separated by commas. They have no limits and may name any
    tenant. Raises InvalidKeys."""
    found: dict[str, ApiKey] = {}
    for variable, is_admin in ((KEYS_ENV, False), (ADMIN_KEYS_ENV, True)):
        for part in environment.get(variable, "").split(","):
            if not (secret := part.strip()):
                continue
            if not (MIN_SECRET_CHARS <= len(secret) <= MAX_SECRET_CHARS and secret.isascii() and secret.isprintable()):
                raise InvalidKeys(
                    f"{variable}: a key has {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} printable ASCII characters"
                )
            digest = hash_of(secret)
            # The same name at every gateway, so that a stream resumes at another gateway.
            found[digest] = make_key(
                f"env-{digest[:12]}",
                sha256=digest,
                any_tenant=True,
                admin=is_admin,
                metrics=True,
                max_priority=float("inf"),
                min_slo_s=0.0,
            )
    return list(found.values())


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return ()
    # ctime: after a chmod, a file that could not be read has to be tried again.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidKeys(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidKeys(f"the file is not UTF-8: {error}") from None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
