"""Which checkpoints are embedding models, and how they pool: sentence-transformers' files beside config.json.

modules.json                 the modules that run one after the other: Transformer, Pooling, Normalize
1_Pooling/config.json        of the Pooling module: its kind
sentence_bert_config.json    of the Transformer: the longest input
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_worker.errors import ModelError
from gpu_worker.models.config import read_json
from paceline.v1.common_pb2 import POOLING_LAST, POOLING_MEAN, EmbeddingInfo

PoolingKind = Literal["last", "mean"]
POOLINGS = {"last": POOLING_LAST, "mean": POOLING_MEAN}
# The files above, as patterns for a hub. modules.json names the folder of the Pooling module.
EMBEDDING_FILES = ["modules.json", "sentence_bert_config.json", "*_Pooling/config.json"]
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
# Of the Pooling module: the keys of older files, and the values of `pooling_mode` in newer ones.
_KINDS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
}


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How the hidden states of an input become its vector."""

    pooling: PoolingKind
    normalize: bool
    # The longest input in tokens, if the files give one. It may exceed the model's limit.
    max_tokens: int | None = None
    # The sizes to which a vector may be cut. None: it may not be cut. Empty: to any size.
    matryoshka: tuple[int, ...] | None = None

    def info(self, size: int) -> EmbeddingInfo:
        """What the scheduler and the gateways are told. `size`: elements of a vector."""
        return EmbeddingInfo(
            pooling=POOLINGS[self.pooling],
            size=size,
            normalized=self.normalize,
            is_matryoshka=self.matryoshka is not None,
            matryoshka_dimensions=self.matryoshka or (),
        )


def read_embedding(folder: Path, pooling: Literal["auto", "last", "mean"] = "auto") -> EmbeddingConfig | None:
    """Read the files of a checkpoint that `read_config` accepts. None: the model generates. Another `pooling` than
    "auto" makes any checkpoint an embedding model, and has precedence over the files.

    Raises ModelError for an embedding model that cannot be served, and for a model without a head if neither files nor
    `pooling` say how to pool."""
    raw = read_json(folder / "config.json")
    name = raw["architectures"][0]
    modules = folder / "modules.json"
    if modules.exists():
        return _from_modules(folder, modules, raw, None if pooling == "auto" else pooling)
    if pooling != "auto":
        return EmbeddingConfig(pooling, normalize=True, matryoshka=_matryoshka(raw))
    if name.endswith("Model"):
        raise ModelError(
            f"{name} has no language-model head, and no modules.json says how to pool its hidden states: "
            "give --pooling last or --pooling mean"
        )
    return None


def _from_modules(folder: Path, path: Path, raw: Mapping[str, Any], override: PoolingKind | None) -> EmbeddingConfig:
    """sentence-transformers' configuration. `override`: the kind of pooling instead of the file's."""
    listed = read_json(path, list)
    modules = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed if _is_module(one)]
    if len(modules) != len(listed):
        raise ModelError(f"{path} has an entry without a type and a path")
    for kind, where in modules:
        if kind not in _SERVED_MODULES:
            raise ModelError(
                f"{path} has the module {kind} ({where}), which is not supported; "
                f"supported: {', '.join(_SERVED_MODULES)}"
            )
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(f"{path} has the modules {', '.join(kinds)}; supported: Transformer, Pooling, Normalize")
    if not (folder / modules[1][1]).resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{path} names a folder outside the checkpoint: {modules[1][1]}")
    transformer = folder / "sentence_bert_config.json"
    limits = read_json(transformer) if transformer.exists() else {}
    if limits.get("do_lower_case"):
        raise ModelError(f"{transformer}: do_lower_case is not supported")
    max_tokens = limits.get("max_seq_length")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ModelError(f"{transformer}: max_seq_length must be a positive integer, got {max_tokens!r}")
    return EmbeddingConfig(
        pooling=override or _kind(folder / modules[1][1] / "config.json"),
        normalize="Normalize" in kinds,
        max_tokens=max_tokens,
        matryoshka=_matryoshka(raw),
    )


def _is_module(value: object) -> bool:
    return isinstance(value, dict) and "type" in value and "path" in value


def _kind(path: Path) -> PoolingKind:
    """The kind of pooling. Kinds that are combined make a longer vector, which is not supported."""
    raw = read_json(path)
    mode = raw.get("pooling_mode")
    if mode is None:
        names = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    else:
        names = [str(mode)] if not isinstance(mode, list) else list(map(str, mode))
    if len(names) != 1 or names[0] not in _KINDS:
        raise ModelError(
            f"{path}: pooling with {' and '.join(names) or 'no mode'} is not supported; supported: one of "
            "pooling_mode_lasttoken and pooling_mode_mean_tokens (--pooling chooses one of them)"
        )
    if _KINDS[names[0]] == "mean" and raw.get("include_prompt") is False:
        raise ModelError(
            f"{path}: include_prompt false is not supported: the server cannot tell instructions from texts"
        )
    return _KINDS[names[0]]


def _matryoshka(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """vLLM's two keys of config.json: `is_matryoshka`, and `matryoshka_dimensions` for some sizes only."""
    sizes = raw.get("matryoshka_dimensions")
    if sizes is None:
        return () if raw.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"config.json: matryoshka_dimensions must be a list of positive integers, got {sizes!r}")
    return tuple(sizes)
