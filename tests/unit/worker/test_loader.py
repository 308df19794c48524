"""Checkpoints that cannot be served are refused in one line that says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from demo import CHECKPOINT
from gpu_worker.build import BuiltWorker
from gpu_worker.errors import ModelError
from gpu_worker.models import loader
from gpu_worker.models.config import parse_config, read_config
from gpu_worker.models.loader import load_model
from gpu_worker.models.rope import inverse_frequencies
from tests.unit.worker.driver import Driver
from tests.unit.worker.families import Reference

CPU = torch.device("cpu")

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": None, "model_type": "bert"}, "architecture none .model_type 'bert'. is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantized checkpoints are not supported .quant_method gptq",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope type 'longrope' is not supported; supported: default",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
    ],
)
def test_config_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        parse_config({**BASE, **changes}, {})
    assert "\n" not in str(error.value)


ROPES = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "rope_theta": 1e5,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
]


@pytest.mark.parametrize("parameters", ROPES, ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rope_frequencies_are_those_of_transformers(parameters: dict[str, Any], spelling: str) -> None:
    raw = {**BASE, "max_position_embeddings": 131072, "head_dim": 64}
    theirs = transformers.LlamaConfig(
        **{k: v for k, v in raw.items() if k not in ("architectures", "rope_theta")}, rope_parameters=dict(parameters)
    )
    rope = dict(parameters)
    if spelling == "rope_scaling":
        raw["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
    else:
        del raw["rope_theta"]
    ours = parse_config({**raw, spelling: rope}, {})
    frequencies, factor = inverse_frequencies(ours.rope, ours.head_dim)
    if parameters["rope_type"] == "default":
        expected, expected_factor = parameters["rope_theta"] ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, CPU)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_end_of_sequence_tokens_come_from_the_generation_config() -> None:
    assert parse_config({**BASE, "eos_token_id": 3}, {}).eos_token_ids == (3,)
    assert parse_config({**BASE, "eos_token_id": 3}, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert parse_config(BASE, {}).eos_token_ids == ()


def test_sliding_windows_are_read_from_the_config() -> None:
    def windows(architecture: str, **changes: Any) -> tuple[int, ...]:
        return parse_config({**BASE, "architectures": [architecture], **changes}, {}).windows

    assert windows("MistralForCausalLM", sliding_window=7) == (7, 7)
    assert windows("MistralForCausalLM", sliding_window=None) == (0, 0)
    assert windows("Qwen2ForCausalLM", sliding_window=7) == (0, 0)
    assert windows("Qwen2ForCausalLM", sliding_window=7, use_sliding_window=True, max_window_layers=1) == (0, 7)
    assert windows("LlamaForCausalLM", sliding_window=7) == (0, 0)
    types = ["sliding_attention", "full_attention"]
    assert windows("Qwen3ForCausalLM", sliding_window=7, use_sliding_window=True, layer_types=types) == (7, 0)
    with pytest.raises(ModelError, match="layer_types has 1 entries for 2 layers"):
        windows("Qwen3ForCausalLM", use_sliding_window=True, layer_types=types[:1])
    with pytest.raises(ModelError, match=r"layer_types \['linear'\] are not supported"):
        windows("Qwen3ForCausalLM", use_sliding_window=True, layer_types=["linear", "full_attention"])


@pytest.fixture
def checkpoint(tmp_path: Path, reference: Callable[[str], Reference]) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(reference("llama-tied").folder, tmp_path / "model"))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks {NORM}"),
        (lambda t: [t.pop(name) for name in list(t) if ".1." in name], "and 6 more"),
        (lambda t: t.update(extra=torch.zeros(2)), "does not know: extra"),
        (lambda t: t.update({NORM: torch.zeros(3)}), rf"{NORM} has shape \[3\], config.json asks for \[64\]"),
        (lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int8)}), f"{NORM} is I8"),
    ],
)
def test_tensors_that_do_not_fit(
    checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    edit_tensors(checkpoint, change)
    with pytest.raises(ModelError, match=message) as error:
        load_model(str(checkpoint), device=CPU)
    assert "\n" not in str(error.value)


def test_missing_and_corrupt_files(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_model(str(tmp_path / "nowhere"), device=CPU)
    (checkpoint / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header....")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load_model(str(checkpoint), device=CPU)
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"lacks model.safetensors .it has pytorch_model.bin"):
        load_model(str(checkpoint), device=CPU)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        read_config(checkpoint)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    strange: dict[str, Any]
    for strange in ({"rms_norm_eps": None}, {"quantization_config": 5}, {"eos_token_id": {}}):
        (checkpoint / "config.json").write_text(json.dumps({**config, **strange}))
        (checkpoint / "generation_config.json").unlink(missing_ok=True)
        with pytest.raises(ModelError, match=r"config\.json has a malformed value"):
            read_config(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        read_config(checkpoint)


def test_weights_that_are_gguf_alone_are_named(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="has its weights as GGUF, which is not supported"):
        load_model(str(tmp_path), device=CPU)
    load_model(str(tmp_path), device=CPU, load_format="dummy")


def test_a_missing_shard_is_named(tmp_path: Path, reference: Callable[[str], Reference]) -> None:
    folder = Path(shutil.copytree(reference("qwen3").folder, tmp_path / "model"))
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks {shards[1].name}"):
        load_model(str(folder), device=CPU)


def test_a_saved_head_is_ignored_if_it_is_tied_to_the_embedding(
    checkpoint: Path, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    edit_tensors(checkpoint, lambda t: t.update({"lm_head.weight": torch.zeros_like(t["model.embed_tokens.weight"])}))
    driver = Driver(build(checkpoint).runner)
    sequence = driver.add([1, 2, 3], 6)
    driver.run()
    assert sequence.output == reference("llama-tied").greedy([1, 2, 3], 6)


def test_half_precision_checkpoints_and_serving(tmp_path: Path, reference: Callable[[str], Reference]) -> None:
    """A checkpoint that is fp16 on disk is loaded as float32 on the CPU, unless another type is asked for."""
    model = reference("llama-tied").model
    transformers.AutoModelForCausalLM.from_pretrained(reference("llama-tied").folder).half().save_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert load_model(str(tmp_path), device=CPU).dtype == torch.float32
    loaded = load_model(str(tmp_path), device=CPU, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert loaded.weights.layers[0].input_norm.dtype == torch.bfloat16


@pytest.mark.parametrize(("has_products", "num_lines"), [(True, 0), (False, 1)])
def test_the_worker_says_that_bfloat16_is_slow(
    has_products: bool, num_lines: int, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: has_products)
    folder = str(reference("llama-tied").folder)
    with capture_logs() as lines:
        for dtype in ("float32", "bfloat16"):
            load_model(folder, load_format="dummy", device=CPU, dtype=dtype)
    assert len([line for line in lines if "--dtype float32 is faster" in line["event"]]) == num_lines


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(
    dtype: str, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    driver = Driver(build(reference("mistral").folder, dtype=dtype).runner, chunk_tokens=9)
    sequences = [driver.add(list(range(5, 5 + n)), 8) for n in (3, 20, 40)]
    driver.run()
    # Rounding decides some tokens in half precision; the first one after a prompt is far from a tie here.
    expected = [reference("mistral").greedy(list(range(5, 5 + n)), 8)[0] for n in (3, 20, 40)]
    assert [s.output[0] for s in sequences] == expected


def test_fingerprint_tells_weights_apart(checkpoint: Path, tmp_path: Path) -> None:
    first = load_model(str(checkpoint), device=CPU)
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    assert load_model(str(copy), device=CPU).fingerprint == first.fingerprint
    edit_tensors(copy, lambda t: t.update({NORM: t[NORM] + 1}))
    assert load_model(str(copy), device=CPU).fingerprint != first.fingerprint
    assert load_model(str(copy), device=CPU).name == "copy"


def test_dummy_weights_need_a_config_alone_and_follow_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    a, b, c = (load_model(str(tmp_path), load_format="dummy", device=CPU, seed=seed) for seed in (0, 0, 1))
    drawn = [model.weights.layers[1].gate_up for model in (a, b, c)]
    first, same, other = (matrix for matrix in drawn if isinstance(matrix, torch.Tensor))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_the_fingerprint_is_that_of_the_model_in_any_type(tmp_path: Path) -> None:
    """So a scheduler may mix types. It compares the types of the workers apart from their fingerprints."""
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    float32, bfloat16 = (
        load_model(str(tmp_path), load_format="dummy", device=CPU, dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    assert float32.fingerprint == bfloat16.fingerprint


def test_progress_counts_up_to_all_bytes(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(str(checkpoint), device=CPU, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_limits_follow_from_the_model_and_the_settings(tmp_path: Path, build: Callable[..., BuiltWorker]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    small = build(tmp_path, load_format="dummy", num_blocks=None, max_num_seqs=3, block_size=16)
    assert small.runner.limits.num_blocks == 3 * 128 // 16
    tight = build(tmp_path, load_format="dummy", num_blocks=None, kv_cache_gib=2**-14, block_size=16)
    # 2 layers x (K, V) x 2 heads x 8 x 4 bytes x 16 tokens = 4096 bytes a block
    assert tight.runner.limits.num_blocks == 16
    with pytest.raises(ModelError, match="max_model_len 129 is more than the model's 128"):
        build(tmp_path, load_format="dummy", max_model_len=129)
