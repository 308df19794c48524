"""Finds a model's files by name: in a folder, or on a model hub (downloaded once and kept)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The time between two log lines about a long download.
_REPORT_EVERY_S = 5.0
_REASON_CHARACTERS = 200
# How long the hub may take to answer whether it has a model.
_PATIENCE_S = 10.0


class NoSuchModel(Exception):
    """The model's files cannot be found or fetched, or are GGUF. The message is one line."""


def local_folder(model: str) -> Path | None:
    folder = Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else None


def checkpoint_folder(model: str, patterns: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    """`model` if it is a folder; otherwise a folder with the hub's matching files of this name. Raises NoSuchModel."""
    folder = local_folder(model)
    if _is_gguf(model, folder):
        raise NoSuchModel(f"{model} is GGUF, which is not supported: a checkpoint is config.json and safetensors files")
    if folder is not None:
        return folder
    if Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise NoSuchModel(f"there is no folder {model}, and it is not a hub name like owner/model")
    return _fetch(model, patterns, ignore, None)


def _is_gguf(model: str, folder: Path | None) -> bool:
    """Whether the model is in GGUF format: a file or a hub name that ends in "gguf", or a folder with .gguf files and
    without config.json."""
    if folder is None:
        return model.lower().endswith("gguf")
    return not (folder / "config.json").exists() and any(folder.glob("*.gguf"))


def more_files(model: str, folder: Path, patterns: Sequence[str]) -> None:
    """Download more files of the same revision into the folder of checkpoint_folder(). Raises NoSuchModel."""
    if local_folder(model) is None:
        _fetch(model, patterns, (), revision=folder.name)


def _fetch(name: str, patterns: Sequence[str], ignore: Sequence[str], revision: str | None) -> Path:
    # Imported here, because the import takes a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    silence = None
    try:
        if revision is None:
            silence = _why_silent(name)
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignore),
            local_files_only=silence is not None,
            tqdm_class=None if sys.stderr.isatty() else _lines_about(name),
        )
    except GatedRepoError as error:
        raise NoSuchModel(
            f"{name} is gated: accept its terms on the hub, and set HF_TOKEN to a token of yours"
        ) from error
    except RepositoryNotFoundError as error:
        raise NoSuchModel(
            f"there is no folder {name}, and the hub has no such model (or it is private: set HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise NoSuchModel(
            f"there is no folder {name}, the hub's cache does not have it (or only a part), "
            f"and the hub cannot be asked: {_one_line(silence or error.__cause__ or error)}"
        ) from error
    except Exception as error:  # the library raises a dozen unrelated types
        raise NoSuchModel(f"{name} cannot be fetched from the hub: {_one_line(error)}") from error
    return Path(folder)


def _why_silent(name: str) -> Exception | None:
    """Why the hub cannot be asked; None if it has the model. snapshot_download() asks the hub, too, but would wait
    forever for an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_PATIENCE_S)
    except (HFValidationError, RepositoryNotFoundError):
        raise
    except Exception as error:  # no network, no answer, offline mode, or a hub error
        return error
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS] or type(error).__name__


def _lines_about(name: str) -> type[Any]:
    """A replacement for progress bars without a terminal: a log line now and then while bytes arrive."""
    from huggingface_hub.utils.tqdm import tqdm

    said_s = time.monotonic()

    class Lines(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = 0 if options.get("unit") == "B" else None
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal said_s
            if self._bytes is None:
                return
            self._bytes += int(n or 0)
            if time.monotonic() - said_s > _REPORT_EVERY_S:
                said_s = time.monotonic()
                print(f"fetching {name}: {self._bytes / 2**20:.0f} MiB so far", file=sys.stderr, flush=True)

    return Lines
