"""Hashes that tell two checkpoints apart, computed from their files without loading weights.

A worker reports these hashes when it registers, and a gateway compares them with the hashes of its own files. The hash
of the tokenizer or of the weights is empty if the folder does not have the files. config.json must exist.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
# Keys of config.json that are not part of the model's identity. (The registration compares the data type.)
_BOOKKEEPING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
# The weights' hash reads this many evenly spread pieces of each file.
_SAMPLE_PIECES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Hashes of a checkpoint's parts."""

    config: str
    tokenizer: str
    weights: str


def read_identity(folder: Path, *, with_weights: bool) -> ModelIdentity:
    """Read the hashes of a checkpoint's folder. `with_weights`: also of its weights, if all their files are present (a
    gateway often has only the small files, or a download is incomplete). Raises OSError, and ValueError for a broken
    config or index.
    """
    weights = ""
    if with_weights:
        files = weight_files(folder)
        weights = hash_weights(files) if all(file.exists() for file in files) else ""
    tokenizer = folder / TOKENIZER
    return ModelIdentity(
        config=_hash_config(folder / "config.json"),
        tokenizer=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else "",
        weights=weights,
    )


def weight_files(folder: Path) -> set[Path]:
    """The files in the checkpoint's index; without an index, the usual single file. Raises ValueError."""
    index = folder / INDEX
    if not index.exists():
        return {folder / "model.safetensors"}
    try:
        return {folder / str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files") from error


def hash_weights(files: Iterable[Path]) -> str:
    """A hash over the names, sizes and sampled pieces of these files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            for piece in range(_SAMPLE_PIECES):
                data.seek(piece * max(size - _SAMPLE_BYTES, 0) // (_SAMPLE_PIECES - 1))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _hash_config(path: Path) -> str:
    config = json.loads(path.read_text("utf-8"))
    kept = {key: value for key, value in config.items() if key not in _BOOKKEEPING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
