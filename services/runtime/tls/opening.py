"""Opens the certificates that a service's settings name, at its start."""

from __future__ import annotations

from pathlib import Path

from services.runtime.service import CannotStart
from services.runtime.tls.files import TlsError, TlsFiles, TlsPaths


def open_tls(folder: Path | None, service: str) -> TlsFiles | None:
    """The certificates of a service in `--tls-dir`. None without a folder. Raises CannotStart."""
    return None if folder is None else open_files(TlsPaths.of(folder, service))


def open_files(paths: TlsPaths) -> TlsFiles:
    """Raises CannotStart."""
    try:
        return TlsFiles(paths)
    except TlsError as error:
        raise CannotStart(f"TLS: {error}") from error
