"""The structure of a decoder-only model of the Llama family, from a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from gpu_worker.errors import ModelError
from gpu_worker.models.architectures import Bias, architecture_of

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. A type ignores the fields that it does not use."""

    type: str
    theta: float
    factor: float = 1.0
    # The number of positions in the original training (llama3, yarn).
    original_max_positions: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes and features of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    # The largest number of prompt and output tokens of one sequence.
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    # Per layer: how many tokens a token sees, itself included; 0: all.
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    # The checkpoint's element type, by torch's name.
    dtype: str
    has_head: bool = True  # False: an embedding model, which computes no logits

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_config(folder: Path) -> DecoderConfig:
    """Read config.json, and the end-of-sequence tokens of generation_config.json if it has them.

    Raises ModelError, with one line, for a model that cannot be served."""
    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        return parse_config(raw, generation)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        # parse_config does not check the type of every value.
        raise ModelError(f"{folder}: config.json or generation_config.json has a malformed value: {error}") from error


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DecoderConfig:
    architecture = architecture_of(raw)
    _refuse_variants(raw, architecture.name)
    num_heads = _positive(raw, "num_attention_heads")
    hidden_size = _positive(raw, "hidden_size")
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads)
    head_dim = _positive(raw, "head_dim", architecture.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd")
    num_layers = _positive(raw, "num_hidden_layers")
    rope = _rope(raw)
    return DecoderConfig(
        architecture=architecture.name,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_positions=_max_positions(raw, rope),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=_has_bias(raw, architecture.qkv_bias),
        output_bias=_has_bias(raw, architecture.output_bias),
        qk_norm=architecture.qk_norm,
        windows=architecture.windows(raw, num_layers),
        eos_token_ids=_eos_token_ids(raw, generation),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _has_bias(raw: Mapping[str, Any], bias: Bias) -> bool:
    return bias == "always" or (bias == "configured" and bool(raw.get("attention_bias", False)))


def _refuse_variants(raw: Mapping[str, Any], architecture: str) -> None:
    """Refuse variants of a supported architecture that would load and then compute something else."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"quantized checkpoints are not supported (quant_method {method}, {architecture})")
    if raw.get("mlp_bias"):
        raise ModelError(f"{architecture} with mlp_bias is not supported")
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        raise ModelError(f"{architecture} with bidirectional attention is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{architecture} with hidden_act {activation!r} is not supported; supported: silu")


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of older versions."""
    parameters: dict[str, Any] = dict(raw.get("rope_scaling") or {})
    parameters.update(raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("rope parameters that differ from layer to layer are not supported")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    if float(parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelError("a partial_rotary_factor other than 1 is not supported")
    known = {name: parameters[name] for name in RopeConfig.__dataclass_fields__ if parameters.get(name) is not None}
    known.pop("type", None)
    if rope_type == "default":
        known = {}
    if rope_type in ("llama3", "yarn"):
        original = parameters.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
        known["original_max_positions"] = int(original or _positive(raw, "max_position_embeddings"))
    if rope_type != "default" and "factor" not in known:
        raise ModelError(f"rope type {rope_type!r} needs a factor")
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    return RopeConfig(type=str(rope_type), theta=theta, **known)


def _max_positions(raw: Mapping[str, Any], rope: RopeConfig) -> int:
    positions = _positive(raw, "max_position_embeddings")
    if rope.type == "yarn":
        return max(positions, int(rope.original_max_positions * rope.factor))
    # dynamic: past max_position_embeddings the angles of tokens already in the KV blocks would change.
    return positions


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


@overload
def read_json(path: Path) -> dict[str, Any]: ...
@overload
def read_json(path: Path, kind: type[list[Any]]) -> list[Any]: ...
def read_json(path: Path, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> dict[str, Any] | list[Any]:
    """The object or the list in a JSON file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelError(f"{path} is not a JSON {'object' if kind is dict else 'list'}")
    return value
