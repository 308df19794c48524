"""Reads limits and generation defaults from a checkpoint folder. It reads no weights and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.request_fields import INT32_MAX, SAMPLING, SamplingParam
from services.runtime.model.hub import checkpoint_folder

# The small files of a checkpoint on the hub. Only workers need the weights.
_HUB_PATTERNS = ["*.json", "*.jinja"]
# Subfolders of a repository contain the same model in other formats.
_HUB_IGNORE = ["*.safetensors.index.json", "*.bin.index.json", "*/*"]
_SMALLEST_SHARE = 1e-9  # of top_p and typical_p


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint as its JSON files describe it.

    `max_model_len`: prompt and output tokens together. `defaults`: the values of sampling
    parameters in generation_config.json.
    """

    folder: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    defaults: Mapping[str, float] = field(default_factory=dict)


def resolve_folder(model: str) -> Path:
    """The folder of a checkpoint, from a path or a name on a model hub (downloads small files). Raises NoSuchModel."""
    return checkpoint_folder(model, _HUB_PATTERNS, _HUB_IGNORE)


def read_model_files(folder: Path) -> ModelFiles:
    """Read config.json and generation_config.json. Raises FileNotFoundError if there is no config.json, and OSError or
    ValueError if a file cannot be read or has an invalid value."""
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
            # Without a limit here, INT32_MAX holds until a worker reports its limit.
            max_model_len=int(config.get("max_position_embeddings") or INT32_MAX),
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=_eos(config) | _eos(generation),
            defaults={
                name: _default(generation[name], param)
                for name, param in SAMPLING.items()
                if param.from_model and generation.get(name) is not None
            },
        )
    except KeyError as error:
        raise ValueError(f"{path}: no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        # A value of an unexpected type may raise either error, above or in _default().
        raise ValueError(f"{folder}: its configuration has a value that makes no sense: {error}") from error


def asked_end(folder: Path) -> str | None:
    """The end of sequence that tokenizer_config.json wants after each text (`add_eos_token`).

    Only a warning needs it. With a tokenizer.json, transformers 5 and Paceline ignore the key. transformers 4 used the
    key for some classes (LlamaTokenizerFast), so a model may have been trained with that token.
    Raises OSError or ValueError."""
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return text if config.get("add_eos_token") is True and isinstance(text, str) else None


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


def _default(value: Any, param: SamplingParam) -> float:
    """A default must be a valid request value. Otherwise every request that uses it would be refused."""
    number = float(value)
    low = -1 if param.minus_one_is_zero else _SMALLEST_SHARE if param.above_low else param.low
    if not low <= number <= param.high:
        raise ValueError(f"{param.name} {number:g} is not within {low:g}..{param.high:g}")
    return param.kind(max(number, 0) if param.minus_one_is_zero else number)
