"""Writes a Llama checkpoint of Hugging Face as a file of llama.cpp (GGUF): `llama_gguf.py CHECKPOINT DTYPE PATH`. Runs
in an environment of its own (tests/peer/env.sh llama)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}
SPACE = "\u2581"  # before a word, in SentencePiece's vocabularies


def write_gguf(checkpoint: Path, dtype: str, path: Path) -> None:
    """Writes a Llama checkpoint of Hugging Face as GGUF. Matrices have the type `dtype`, and norms are float32. The
    vocabulary has a word for each id, and token 2 ends a text, as in the tokenizer of bench.cpu.models."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    words = [f"{SPACE}w{token}" for token in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = tensor.astype(np.float32)
        if name.endswith("q_proj.weight"):
            array = interleaved(array, heads)
        if name.endswith("k_proj.weight"):
            array = interleaved(array, kv_heads)
        kind = TYPES[dtype] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        found = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(found, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary positions. Transformers 5 writes it into `rope_parameters`."""
    parameters = config.get("rope_parameters") or config
    return float(parameters["rope_theta"])


def interleaved(matrix: Any, heads: int) -> Any:
    """The rows [heads * size, in] of a query or key matrix in the order of GGUF. Hugging Face rotates row i of a head
    with row i + size / 2, and llama.cpp rotates rows 2 i and 2 i + 1."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
