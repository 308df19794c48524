"""The architectures that the decoder serves: one entry for each, with all its differences from the others.

If decoder.py already has all layers of a new architecture, add an entry here, and a family in
tests/unit/worker/families.py. Then the tests compare its tokens with transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpu_worker.errors import ModelError

# transformers' defaults, for a config.json without these fields.
DEFAULT_WINDOW_TOKENS = 4096
DEFAULT_FULL_LAYERS = 28

# "configured": as `attention_bias` of config.json says.
Bias = Literal["always", "configured", "never"]
# Takes config.json and the number of layers. Returns how many tokens each layer attends to (0: all).
Windows = Callable[[Mapping[str, Any], int], tuple[int, ...]]


def no_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Every layer attends to all tokens."""
    return (0,) * num_layers


def same_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Every layer has the same window: `sliding_window` of config.json. Missing: transformers' default. null: none."""
    return (_window_tokens(raw),) * num_layers


def windows_by_layer(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """`layer_types` says which layers have a window. Without it, those from index `max_window_layers` on have one.
    Without `use_sliding_window` no layer has a window. Raises ModelError for another type or number of layers."""
    if not raw.get("use_sliding_window", False):
        return no_windows(raw, num_layers)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        full_layers = int(raw.get("max_window_layers", DEFAULT_FULL_LAYERS))
        layer_types = ["sliding_attention" if i >= full_layers else "full_attention" for i in range(num_layers)]
    if len(layer_types) != num_layers:
        raise ModelError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    if unknown := set(layer_types) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"layer_types {sorted(unknown)} are not supported")
    return tuple(_window_tokens(raw) if kind == "sliding_attention" else 0 for kind in layer_types)


def _window_tokens(raw: Mapping[str, Any]) -> int:
    return int(raw.get("sliding_window", DEFAULT_WINDOW_TOKENS) or 0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the decoder must know of an architecture. `name` is its name in `architectures` of config.json."""

    name: str
    qkv_bias: Bias
    output_bias: Bias
    windows: Windows
    # RMS norm of each query and key head.
    qk_norm: bool = False
    # Used if config.json has no head_dim. 0: hidden_size / num_attention_heads.
    head_dim: int = 0


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM", qkv_bias="configured", output_bias="configured", windows=no_windows),
        Architecture("MistralForCausalLM", qkv_bias="never", output_bias="never", windows=same_windows),
        Architecture("Qwen2ForCausalLM", qkv_bias="always", output_bias="never", windows=windows_by_layer),
        Architecture(
            "Qwen3ForCausalLM",
            qkv_bias="configured",
            output_bias="configured",
            windows=windows_by_layer,
            qk_norm=True,
            head_dim=128,
        ),
    )
}


def architecture_of(raw: Mapping[str, Any]) -> Architecture:
    """The entry for a config.json. A model without a language-model head is named LlamaModel, MistralModel and so on.
    It has the same layers, and serves embeddings only. Raises ModelError if there is no entry."""
    names = raw.get("architectures") or []
    name = names[0] if names else f"none (model_type {raw.get('model_type')!r})"
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if (family := str(name).removesuffix("Model") + "ForCausalLM") in ARCHITECTURES and str(name).endswith("Model"):
        return replace(ARCHITECTURES[family], name=name)
    headless = ", ".join(known.replace("ForCausalLM", "Model") for known in ARCHITECTURES)
    raise ModelError(
        f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}, and for embeddings {headless} "
        "(not encoders with bidirectional attention, such as BERT)"
    )
