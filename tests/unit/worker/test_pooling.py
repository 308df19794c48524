"""Vectors of an embedding model equal those of transformers, in any batch and with any chunks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.build import BuiltWorker
from gpu_worker.errors import ModelError, ProtocolViolation
from paceline.v1.common_pb2 import POOLING_LAST, POOLING_MEAN
from paceline.v1.worker_pb2 import StepPlan
from tests.support import embedding_checkpoints as checkpoints
from tests.unit.worker.inputs import Inputs

Build = Callable[..., BuiltWorker]
RANDOM = random.Random(7)
INPUTS = [[RANDOM.randrange(3, 320) for _ in range(length)] for length in (1, 5, 16, 17, 33, 90, 41)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_vectors_are_those_of_transformers_in_any_batch_and_any_chunks(
    family: str, pooling: checkpoints.Pooling, tmp_path: Path, build: Build
) -> None:
    folder = checkpoints.make(family, tmp_path, pooling)
    built = build(folder)
    wanted = [checkpoints.expected(folder, tokens, pooling) for tokens in INPUTS]
    for chunk in (1000, 7):
        for slot, vector in Inputs(built.runner, chunk).run(INPUTS).items():
            assert np.abs(vector - wanted[slot]).max() < 1e-4, (chunk, slot)
        built.runner.reset()
    assert max(np.abs(one - wanted[0]).max() for one in wanted[1:]) > 0.05, (
        "the inputs have different reference vectors"
    )


def test_last_and_mean_pooling_differ(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, "last")
    last, mean = (checkpoints.expected(folder, INPUTS[4], pooling) for pooling in ("last", "mean"))
    assert np.abs(last - mean).max() > 0.05


def test_without_normalize_vectors_keep_their_length(tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("qwen2", tmp_path, "mean", normalize=False)
    wanted = checkpoints.expected(folder, INPUTS[5], "mean", normalize=False)
    assert abs(np.linalg.norm(wanted) - 1) > 0.5
    for chunk in (1000, 20):
        [vector] = Inputs(build(folder).runner, chunk).run([INPUTS[5]]).values()
        assert np.abs(vector - wanted).max() < 1e-3, chunk
    assert not build(folder).info.embedding.normalized


def test_last_pooling_continues_after_cached_tokens(tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("qwen3", tmp_path, "last")
    inputs = Inputs(build(folder).runner)
    first = inputs.run([INPUTS[5]])[0]
    again = inputs.run([INPUTS[5]], cached=len(INPUTS[5]) - 1, blocks=inputs.tables[0])[0]
    assert np.abs(again - first).max() < 1e-5


def test_a_mean_that_was_preempted_starts_again(tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("llama", tmp_path, "mean")
    inputs = Inputs(build(folder).runner, 20)
    left = inputs.begin([INPUTS[5]])
    assert not inputs.run_step(left).embeddings
    inputs.freed = [0]
    assert np.abs(inputs.run([INPUTS[6]])[0] - checkpoints.expected(folder, INPUTS[6], "mean")).max() < 1e-4


def test_a_vector_that_is_no_number_fails_its_input_alone(tmp_path: Path, build: Build) -> None:
    built = build(checkpoints.make("llama", tmp_path, "mean"))
    embedding = built.runner._decoder._weights.embedding
    assert isinstance(embedding, torch.Tensor)
    embedding[5] = torch.nan
    inputs = Inputs(built.runner)
    result = inputs.run_step(inputs.begin([[5, 6], [7, 8]]))
    assert [one.slot for one in result.embeddings] == [1]
    assert [(error.slot, "NaN" in error.message) for error in result.errors] == [(0, True)]


def test_a_plan_that_decodes_is_refused(tmp_path: Path, build: Build) -> None:
    inputs = Inputs(build(checkpoints.make("llama", tmp_path, "last")).runner)
    inputs.run_step(inputs.begin([[5, 6]]))
    with pytest.raises(ProtocolViolation, match="no decode rows"):
        inputs.runner.step(StepPlan(step=2))


def test_the_model_info_of_a_worker_has_its_pooling(tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("qwen3", tmp_path / "a", "last", matryoshka_dimensions=[16, 32])
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    info = build(folder).info
    assert (info.embedding.pooling, info.embedding.size, info.embedding.normalized) == (POOLING_LAST, 64, True)
    assert (info.embedding.is_matryoshka, list(info.embedding.matryoshka_dimensions)) == (True, [16, 32])
    assert (info.max_model_len, info.architecture) == (100, "Qwen3ForCausalLM")
    other = build(folder, pooling="mean", max_model_len=200).info
    assert (other.embedding.pooling, other.max_model_len) == (POOLING_MEAN, 200)
    assert other.fingerprint != info.fingerprint, "workers that pool differently do not serve one model"
    plain = build(checkpoints.make("llama", tmp_path / "b", None), pooling="mean").info
    assert (plain.embedding.pooling, plain.embedding.normalized, plain.embedding.is_matryoshka) == (
        POOLING_MEAN, True, False,
    )  # fmt: skip


def test_a_checkpoint_with_a_head_generates_unless_pooling_says_otherwise(reference: Any, build: Build) -> None:
    folder = reference("llama3-rope").folder
    assert not build(folder).info.HasField("embedding")
    tokens = [token % 199 for token in INPUTS[2]]
    [vector] = Inputs(build(folder, pooling="last").runner).run([tokens]).values()
    assert np.abs(vector - checkpoints.expected(folder, tokens, "last")).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: checkpoints.add_modules(f, "cls"), "pooling_mode_cls_token is not supported"),
        (lambda f: checkpoints.add_modules(f, "none"), "no mode"),
        (lambda f: checkpoints.add_modules(f, "last", more=["Dense"]), "the module Dense"),
        (lambda f: (f / "modules.json").write_text("{}"), "not a JSON list"),
        (lambda f: (f / "modules.json").write_text("[1]"), "without a type and a path"),
        (lambda f: (f / "modules.json").unlink(), "give --pooling last or --pooling mean"),
        (lambda f: (f / "1_Pooling" / "config.json").unlink(), "cannot read"),
        (lambda f: (f / "sentence_bert_config.json").write_text('{"do_lower_case": true}'), "do_lower_case"),
        (lambda f: (f / "sentence_bert_config.json").write_text('{"max_seq_length": 0}'), "max_seq_length"),
        (lambda f: (f / "sentence_bert_config.json").write_text('{"max_seq_length": true}'), "max_seq_length"),
    ],
)
def test_a_checkpoint_without_pooling_support_is_refused_at_load(
    change: Callable[[Path], object], why: str, tmp_path: Path, build: Build
) -> None:
    folder = checkpoints.make("llama", tmp_path, "last")
    change(folder)
    with pytest.raises(ModelError, match=why):
        build(folder)


def test_both_spellings_of_the_pooling_mode_are_read(tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("llama", tmp_path, "cls")
    for mode, wanted in (("lasttoken", POOLING_LAST), ("mean", POOLING_MEAN)):
        (folder / "1_Pooling" / "config.json").write_text(f'{{"pooling_mode": "{mode}"}}')
        assert build(folder).info.embedding.pooling == wanted
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "include_prompt": false}')
    with pytest.raises(ModelError, match="include_prompt"):
        build(folder)
    assert build(folder, pooling="last").info.embedding.pooling == POOLING_LAST


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["BertModel"]}, "not encoders with bidirectional attention, such as BERT"),
        ({"is_causal": False}, "bidirectional attention is not supported"),
        ({"use_bidirectional_attention": True}, "bidirectional attention is not supported"),
        ({"matryoshka_dimensions": [0]}, "matryoshka_dimensions"),
        ({"matryoshka_dimensions": [True]}, "matryoshka_dimensions"),
    ],
)
def test_encoders_are_refused_at_load(changes: dict[str, Any], why: str, tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("llama", tmp_path, "last")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=why):
        build(folder)


def test_vectors_of_a_step_must_fit_a_message(tmp_path: Path, build: Build) -> None:
    folder = checkpoints.make("llama", tmp_path, "last", hidden_size=2048)
    assert build(folder, max_num_seqs=1024).runner.limits.max_num_seqs == 1024
    with pytest.raises(ModelError, match="can carry at most 1024"):
        build(folder, max_num_seqs=1025)
    # On a CPU a step has at least twice as many tokens as slots, so only the number of slots limits the vectors of a
    # step.
    folder = checkpoints.make("llama", tmp_path / "small", "last", hidden_size=1024)
    with pytest.raises(ModelError, match="can carry at most 2048"):
        build(folder, max_num_seqs=2049)
