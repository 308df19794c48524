"""Models by name: the files that a service needs, from a folder or, fetched once and kept, from a model hub."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Repositories carry the same weights in other formats below the top: nothing there is needed.
_NEVER = ["*/*"]
# Between two lines about a download that takes long.
_REPORT_EVERY_S = 5.0
_REASON_CHARACTERS = 200
# How long the hub may take to say whether it knows a model.
_PATIENCE_S = 10.0


class NoSuchModel(Exception):
    """There is no such folder, and the hub does not give such a model. The message is one line."""


def local_folder(model: str) -> Path | None:
    folder = Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else None


def checkpoint_folder(model: str, patterns: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    """`model` if it is a folder; else the folder with the hub's files of this name that match. Raises NoSuchModel."""
    folder = local_folder(model)
    if _is_gguf(model, folder):
        raise NoSuchModel(f"{model} is GGUF, which is not supported: a checkpoint is config.json and safetensors files")
    if folder is not None:
        return folder
    if Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise NoSuchModel(f"there is no folder {model}, and it is not a hub name like owner/model")
    return _fetch(model, patterns, ignore, None)


def _is_gguf(model: str, folder: Path | None) -> bool:
    """A file, a folder with nothing else that is a model, or a repository that says so in its name, as most do."""
    if folder is None:
        return model.lower().endswith("gguf")
    return not (folder / "config.json").exists() and any(folder.glob("*.gguf"))


def more_files(model: str, folder: Path, patterns: Sequence[str]) -> None:
    """Fetch further files into what checkpoint_folder() gave, of the same revision. Raises NoSuchModel."""
    if local_folder(model) is None:
        _fetch(model, patterns, (), revision=folder.name)


def _fetch(name: str, patterns: Sequence[str], ignore: Sequence[str], revision: str | None) -> Path:
    # Only here: it takes a second to import.
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
            ignore_patterns=[*_NEVER, *ignore],
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
    except Exception as error:  # the client raises a dozen unrelated types
        raise NoSuchModel(f"{name} cannot be fetched from the hub: {_one_line(error)}") from error
    return Path(folder)


def _why_silent(name: str) -> Exception | None:
    """None if the hub knows the model. snapshot_download() asks as well, but would wait for ever for an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_PATIENCE_S)
    except (HFValidationError, RepositoryNotFoundError):
        raise
    except Exception as error:  # no network, no answer, told to stay offline, a hub in trouble
        return error
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS] or type(error).__name__


def _lines_about(name: str) -> type[Any]:
    """What the client shall use for bars where there is no terminal: a line now and then while bytes arrive."""
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
