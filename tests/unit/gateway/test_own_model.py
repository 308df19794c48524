"""When a gateway's model and the one that the workers serve are the same, and what is said if they are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import CHECKPOINT
from paceline.v1.common_pb2 import ModelInfo
from services.gateway.text.own_model import OwnModel
from services.runtime.model.identity import ModelIdentity, read_identity, weight_files

OWN = OwnModel("models/a", 1024, "", ModelIdentity("c" * 64, "t" * 64, "w" * 64))
SAME = {
    "name": "b",
    "vocab_size": 1024,
    "dtype": "float32",
    "config_fingerprint": "c" * 64,
    "tokenizer_fingerprint": "t" * 64,
    "weights_fingerprint": "w" * 64,
}


def difference(own: OwnModel = OWN, **changes: Any) -> str:
    return own.difference(ModelInfo(**{**SAME, **changes}))


def test_the_same_parts_are_the_same_model() -> None:
    assert difference() == ""


@pytest.mark.parametrize("part", ["config", "tokenizer", "weights"])
def test_each_part_tells_models_apart_and_both_are_named(part: str) -> None:
    told = difference(OWN, **{f"{part}_fingerprint": "f" * 64})
    mine = {"config": "c", "tokenizer": "t", "weights": "w"}[part]
    assert told == (
        f"this gateway has the model models/a ({part} {mine * 12}), "
        f"but the workers serve b ({part} ffffffffffff)"
    )  # fmt: skip


def test_the_vocabulary_tells_models_apart() -> None:
    assert "(vocab_size 1024), but the workers serve b (vocab_size 2048)" in difference(vocab_size=2048)


def test_a_dtype_that_the_operator_set_must_match() -> None:
    assert difference(replace(OWN, dtype="float32")) == ""
    told = difference(replace(OWN, dtype="bfloat16"))
    assert "(dtype bfloat16), but the workers serve b (dtype float32)" in told


def test_quantized_workers_serve_in_the_type_of_their_activations() -> None:
    assert difference(replace(OWN, dtype="bfloat16"), dtype="bfloat16+int8") == ""
    assert "dtype float32" in difference(replace(OWN, dtype="float32"), dtype="bfloat16+int8")


@pytest.mark.parametrize("part", ["config", "tokenizer", "weights"])
def test_a_part_that_one_side_lacks_is_not_compared(part: str) -> None:
    """Dummy weights, no tokenizer, a gateway with the small files alone, a worker of an older version."""
    assert difference(OWN, **{f"{part}_fingerprint": ""}) == ""
    assert difference(replace(OWN, identity=replace(OWN.identity, **{part: ""}))) == ""


def edited(tmp_path: Path, edit: Callable[[Path], object]) -> ModelIdentity:
    copy = Path(shutil.copytree(CHECKPOINT, tmp_path / "copy"))
    edit(copy)
    return read_identity(copy, with_weights=True)


def edit_config(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=4))

    return edit


DEMO = read_identity(CHECKPOINT, with_weights=True)


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    assert edited(tmp_path, lambda folder: None) == DEMO
    assert all((DEMO.config, DEMO.tokenizer, DEMO.weights))


def test_bookkeeping_in_the_config_is_no_difference(tmp_path: Path) -> None:
    edit = edit_config(transformers_version="1.0", _name_or_path="elsewhere", torch_dtype="float16")
    assert edited(tmp_path, edit).config == DEMO.config


def test_another_shape_is_a_difference(tmp_path: Path) -> None:
    assert edited(tmp_path, edit_config(num_hidden_layers=7)).config != DEMO.config


def test_another_tokenizer_is_a_difference(tmp_path: Path) -> None:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace("Once", "Onze"))

    assert edited(tmp_path, lambda folder: edit(folder)).tokenizer != DEMO.tokenizer


def test_other_weights_are_a_difference(tmp_path: Path) -> None:
    def edit(folder: Path) -> None:
        [file] = weight_files(folder)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    assert edited(tmp_path, edit).weights != DEMO.weights


def test_without_weights_their_hash_is_empty(tmp_path: Path) -> None:
    def edit(folder: Path) -> None:
        for file in weight_files(folder):
            file.unlink()

    assert edited(tmp_path, edit) == replace(DEMO, weights="")
    assert read_identity(CHECKPOINT, with_weights=False) == replace(DEMO, weights="")
