"""Small random embedding checkpoints, as sentence-transformers lays them out, and their vectors by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from demo import CHECKPOINT
from tests.support.checkpoints import COMMON, LLAMA3_ROPE, fill

Pooling = Literal["last", "mean"]
# Config class, changes to COMMON, and the architecture in config.json: a base model, or a model with an LM head.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}, "LlamaModel"),
    "mistral": ("MistralConfig", {"sliding_window": 24}, "MistralModel"),
    "qwen2": ("Qwen2Config", {}, "Qwen2Model"),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}, "Qwen3ForCausalLM"),
}
SIZE = COMMON["hidden_size"]
EOS = "<|eos|>"  # of add_tokenizer(): token 1
_KEYS = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def make(
    family: str, folder: Path, pooling: str | None, *, normalize: bool = True, seed: int = 0, **config: Any
) -> Path:
    """Write a random fp32 checkpoint. `pooling` None: without sentence-transformers' files. `config`: more keys of
    config.json."""
    import transformers

    name, changes, architecture = FAMILIES[family]
    torch.manual_seed(seed)
    made = getattr(transformers, name)(**COMMON | changes | config)
    model = transformers.AutoModel.from_config(made, dtype=torch.float32)
    fill(model)
    model.save_pretrained(folder)  # weights have no prefix `model.`, as in Qwen3-Embedding
    written = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(written))
    if pooling is not None:
        add_modules(folder, pooling, normalize=normalize)
    return folder


def add_modules(folder: Path, pooling: str, *, normalize: bool = True, more: Sequence[str] = ()) -> None:
    """Write sentence-transformers' files. `more`: further modules at the end."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *more]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    keys = {key: name == pooling for name, key in _KEYS.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE, **keys}))


def add_tokenizer(folder: Path) -> None:
    """Write the demo model's tokenizer, which ends each text with `<|eos|>`, as Qwen3-Embedding's does."""
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    processor = tokenizer["post_processor"]
    processor["single"] += [{"SpecialToken": {"id": EOS, "type_id": 0}}]
    processor["special_tokens"][EOS] = {"id": EOS, "ids": [1], "tokens": [EOS]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@cache
def _model(folder: str) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def expected(
    folder: Path, tokens: Sequence[int], pooling: Pooling, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """transformers' hidden states, pooled."""
    with torch.no_grad():
        hidden = _model(str(folder))(torch.tensor([list(tokens)])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    if normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    return vector.numpy()
