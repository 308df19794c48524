"""Reads limits and generation defaults from a checkpoint folder. It reads no weights and no tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.model.hub import checkpoint_folder

# The small files of a checkpoint on the hub. Only workers need the weights.
_HUB_PATTERNS = ["*.json", "*.jinja"]
_HUB_IGNORE = ["*.safetensors.index.json", "*.bin.index.json"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint as its JSON files describe it.

    `max_model_len`: prompt and output tokens together. The fields from `temperature` on are the defaults of a request.
    """

    folder: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


def resolve_folder(model: str) -> Path:
    """The folder of a checkpoint, from a path or a name on a model hub (downloads small files). Raises NoSuchModel."""
    return checkpoint_folder(model, _HUB_PATTERNS, _HUB_IGNORE)


NO_LIMIT = 2**31 - 1


def read_model_files(folder: Path) -> ModelFiles:
    """Read config.json and generation_config.json. Raises FileNotFoundError or ValueError."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no config.json")
    config = read_json_object(path)
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    try:
        # Multimodal checkpoints have the language model's part one level below.
        config = {**config, **config.get("text_config", {})}
        return ModelFiles(
            folder=folder,
            # A worker that serves the model reports its length, too.
            max_model_len=int(config.get("max_position_embeddings") or NO_LIMIT),
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=_eos(config) | _eos(generation),
            temperature=_number(generation, "temperature", 1.0, 0.0, 100.0),
            top_p=_number(generation, "top_p", 1.0, 1e-9, 1.0),
            top_k=max(0, int(_number(generation, "top_k", 0, -1, NO_LIMIT))),  # -1 also means "all"
            min_p=_number(generation, "min_p", 0.0, 0.0, 1.0),
            typical_p=_number(generation, "typical_p", 1.0, 1e-9, 1.0),
            repetition_penalty=_number(generation, "repetition_penalty", 1.0, 0.01, 100.0),
        )
    except KeyError as error:
        raise ValueError(f"{path}: no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        # One rule for values of all unexpected types.
        raise ValueError(f"{folder}: its configuration has a value that makes no sense: {error}") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises OSError, or ValueError that names the file."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError, or ValueError that names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _eos(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _number(config: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A default must be a valid request value. Otherwise every request that uses it would be refused."""
    value = config.get(name)
    number = default if value is None else float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} {number:g} is not within {low:g}..{high:g}")
    return number
