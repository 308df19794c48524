"""The tensors of a decoder, in the checkpoint and in memory.

Matrices are [in, out]. On a CPU the matrices of the layers are stored that way (faster for few rows). On a GPU they are
views of the checkpoint's [out, in] (which cuBLAS is tuned for). On every device, a head that is not packed is such a
view. Packed matrices are in the order that a CPU's kernels read. q, k and v are one matrix, and so are gate and up. The
q and k heads have their rotary pairs side by side (models/rope.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.int8 import Int8Embedding, Int8Matrix, quantize
from gpu_worker.models.rope import interleave_heads

# Returns a checkpoint's tensor by name.
Source = Callable[[str], Tensor]
# All matrices of a model are of the same kind.
Matrix = Tensor | Int8Matrix
# Packs a matrix [out, in] for the products of the device.
Pack = Callable[[Tensor], Matrix]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The tensors of one layer."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The tensors of a decoder."""

    embedding: Tensor | Int8Embedding  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Matrix  # [hidden, vocab]; of an embedding model [hidden, 0]


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {f"self_attn.{x}_proj.bias": (size,) for x, size in (("q", q_size), ("k", kv_size), ("v", kv_size))}
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in ("q", "k")}
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if config.has_head and not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def assemble(
    config: DecoderConfig, source: Source, pack: Pack | None = None, quantized_embedding: bool = False
) -> DecoderWeights:
    """`source` returns each tensor of expected_tensors() in the type and on the device to serve with. `pack`: for the
    matrices; without it they are [in, out]. A tied head is the embedding, unless the embedding is quantized: then the
    head is a packed matrix of its own."""
    table = source("model.embed_tokens.weight")
    embedding = Int8Embedding(*quantize(table), table.dtype) if quantized_embedding else table
    # Before the layers, because the head is in memory twice while it is packed.
    if not config.has_head:
        head: Matrix = table.new_empty(config.hidden_size, 0)
        del table
    elif not config.tie_embeddings:
        del table
        head = pack(source("lm_head.weight")) if pack else source("lm_head.weight").t()
    elif quantized_embedding and pack:
        head = pack(table)
        del table
    else:
        head = table.t()  # packing would make a second copy
    layers = tuple(_layer(config, i, source, pack or _matrix) for i in range(config.num_layers))
    return DecoderWeights(embedding, layers, source("model.norm.weight"), head)


def _layer(config: DecoderConfig, index: int, source: Source, matrix: Pack) -> LayerWeights:
    def get(name: str) -> Tensor:
        return source(f"model.layers.{index}.{name}")

    def heads(name: str) -> Tensor:
        return interleave_heads(get(f"self_attn.{name}"), config.head_dim)

    def qkv(kind: str) -> Tensor:
        return torch.cat([heads(f"q_proj.{kind}"), heads(f"k_proj.{kind}"), get(f"self_attn.v_proj.{kind}")])

    return LayerWeights(
        input_norm=get("input_layernorm.weight"),
        qkv=matrix(qkv("weight")),
        qkv_bias=qkv("bias") if config.qkv_bias else None,
        query_norm=heads("q_norm.weight") if config.qk_norm else None,
        key_norm=heads("k_norm.weight") if config.qk_norm else None,
        output=matrix(get("self_attn.o_proj.weight")),
        output_bias=get("self_attn.o_proj.bias") if config.output_bias else None,
        mlp_norm=get("post_attention_layernorm.weight"),
        gate_up=matrix(torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])),
        down=matrix(get("mlp.down_proj.weight")),
    )


def _matrix(weight: Tensor) -> Tensor:
    """[in, out] from [out, in]."""
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()
