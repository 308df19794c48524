"""The path of a GPU worker through FlashInfer, as far as a CPU can test it.

FlashInfer's own Python code runs with reference kernels (tests/support/flashinfer_kernels.py). Not tested: the real
kernels, CUDA streams and speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.attention.flashinfer import FlashInferAttention, unsupported
from gpu_worker.kv.pool import allocate_pool
from gpu_worker.models.config import DecoderConfig, RopeConfig
from gpu_worker.models.flashinfer_ops import FlashInferOps
from gpu_worker.models.ops import TorchOps
from gpu_worker.steps.graphs import Replay
from gpu_worker.steps.step_arrays import StepArrays
from tests.support import embedding_checkpoints
from tests.support.attention import metadata_of
from tests.support.flashinfer_kernels import reference_kernels
from tests.support.gpu_twin import CPU, twin
from tests.unit.worker.driver import Driver
from tests.unit.worker.families import FAMILIES, VOCAB, Reference, make_checkpoint
from tests.unit.worker.inputs import Inputs

NEW_TOKENS = 12
_rng = np.random.default_rng(5)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (1, 2, 16, 33, 64, 90)]


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[Any]:
    with reference_kernels() as module:
        yield module


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}
    return lambda name: made.setdefault(name, make_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(16, 64), (1, 7)])
def test_a_model_is_as_in_transformers(
    family: str, block_size: int, chunk_tokens: int, flashinfer: Any, reference: Callable[[str], Reference]
) -> None:
    checkpoint = reference(family)
    driver = Driver(twin(flashinfer, checkpoint.folder, block_size=block_size, num_blocks=2000), chunk_tokens)
    sequences = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
    driver.run()
    assert [s.output for s in sequences] == [checkpoint.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", embedding_checkpoints.FAMILIES)
def test_vectors_are_as_in_transformers(
    family: str, pooling: embedding_checkpoints.Pooling, flashinfer: Any, tmp_path: Path
) -> None:
    folder = embedding_checkpoints.make(family, tmp_path, pooling)
    wanted = [embedding_checkpoints.expected(folder, prompt, pooling) for prompt in PROMPTS]
    for chunk in (1000, 7):
        for slot, vector in Inputs(twin(flashinfer, folder), chunk).run(PROMPTS).items():
            assert np.abs(vector - wanted[slot]).max() < 1e-4, (chunk, slot)


class CountingCapture:
    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], object]) -> Replay:
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


@pytest.mark.parametrize("family", ["llama3-rope", "mistral", "qwen3"])
def test_a_model_is_as_in_transformers_with_graphs(
    family: str, flashinfer: Any, reference: Callable[[str], Reference]
) -> None:
    """Sequences come and go: steps are filled up by 0 to 3 rows, are mixed, or have more rows than any graph."""
    checkpoint = reference(family)
    capture = CountingCapture()
    driver = Driver(twin(flashinfer, checkpoint.folder, graph_sizes=(1, 2, 6), capture=capture), 64)
    lengths = [NEW_TOKENS + 4 * i for i in range(len(PROMPTS))]
    sequences = [driver.add(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    late = [driver.add(PROMPTS[i], NEW_TOKENS) for i in (2, 3)]
    driver.run()
    assert capture.replays > 15
    assert [s.output for s in sequences] == [
        checkpoint.greedy(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    assert [s.output for s in late] == [checkpoint.greedy(PROMPTS[i], NEW_TOKENS) for i in (2, 3)]


@pytest.mark.parametrize("family", ["llama3-rope", "mistral", "qwen2", "qwen3"])
def test_a_model_is_as_in_transformers_with_captured_pieces(
    family: str, flashinfer: Any, reference: Callable[[str], Reference]
) -> None:
    """Steps are padded by 0 to 47 rows, or have more rows than the largest piece."""
    checkpoint = reference(family)
    capture = CountingCapture()
    driver = Driver(twin(flashinfer, checkpoint.folder, piece_sizes=(16, 64), capture=capture), 50)
    sequences = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
    driver.run()
    assert capture.replays >= 2 * 10
    assert [s.output for s in sequences] == [checkpoint.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_padding_rows_change_nothing(
    flashinfer: Any, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other padding rows give the same tokens and the same KV, bit for bit. The dummy block gets all of their KV."""
    folder = reference("llama3-rope").folder
    padded = StepArrays.with_padding_rows

    def other_rows(arrays: StepArrays, size: int) -> StepArrays:
        rows, made = arrays.num_rows, padded(arrays, size)
        made.prefill_tokens[rows - arrays.num_decodes :] = 7
        made.positions[rows:] = 3
        return made

    runs = []
    for rows in (padded, other_rows):
        monkeypatch.setattr(StepArrays, "with_padding_rows", rows)
        runner = twin(flashinfer, folder, piece_sizes=(64,))
        driver = Driver(runner, 50)
        sequences = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
        driver.run()
        runs.append(([s.output for s in sequences], runner._pool.storage))
    (tokens, kv), (others, other_kv) = runs
    assert tokens == others
    torch.testing.assert_close(kv[:, :, 1:], other_kv[:, :, 1:], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(kv[:, :, 0], other_kv[:, :, 0])


def test_the_kernels_get_bf16(flashinfer: Any, reference: Callable[[str], Reference]) -> None:
    """Every kernel asserts its types. Only a GPU can show that the output is close to fp32's (tests/gpu)."""
    driver = Driver(twin(flashinfer, reference("qwen3").folder, dtype="bfloat16", graph_sizes=(8,)), 64)
    sequences = [driver.add(prompt, 4) for prompt in PROMPTS]
    driver.run()
    assert all(0 <= token < VOCAB for s in sequences for token in s.output)


def test_the_trial_step_of_the_memory_measurement_runs(flashinfer: Any, reference: Callable[[str], Reference]) -> None:
    """The trial step writes only to the dummy block."""
    runner = twin(flashinfer, reference("mistral").folder, num_blocks=1)
    runner.try_largest_step()
    assert runner._pool.storage[:, :, 1].isnan().all()
    assert runner._pool.storage[:, :, 0].isfinite().all()


def _config(qk_norm: bool) -> DecoderConfig:
    return DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=11,
        hidden_size=48,
        intermediate_size=40,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-3,
        rope=RopeConfig("yarn", 100.0, factor=4.0, original_max_positions=8),
        max_positions=32,
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        qk_norm=qk_norm,
        windows=(0,),
        eos_token_ids=(),
        dtype="float32",
    )


@pytest.mark.parametrize("qk_norm", [False, True])
def test_both_kinds_of_layer_ops_agree(qk_norm: bool, flashinfer: Any) -> None:
    config = _config(qk_norm)
    ours, theirs = TorchOps(config, 32, CPU), FlashInferOps(flashinfer, config, 32, CPU)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48), torch.randn(48)
    torch.testing.assert_close(theirs.norm(x, weight), ours.norm(x, weight))
    gate_up = torch.randn(5, 80)
    torch.testing.assert_close(theirs.silu_and_mul(gate_up.clone()), ours.silu_and_mul(gate_up.clone()))
    heads, positions = torch.randn(5, 10, 8), torch.tensor([0, 31, 7, 7, 1])
    norms = (torch.randn(8), torch.randn(8)) if qk_norm else (None, None)
    expected = ours.rotary(heads.clone(), ours.angles(positions), *norms)
    turned = theirs.rotary(heads, theirs.angles(positions), *norms)
    for mine, other in zip(turned, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_captured_step_reads_fixed_addresses(flashinfer: Any) -> None:
    """The arguments that a graph's kernels got at its capture are still valid after a new plan."""
    pool = allocate_pool(9, 4, 1, 2, 8, torch.float32, CPU)
    attention = FlashInferAttention(flashinfer, pool, (0,), 4, 16, workspace_bytes=1024)
    seen = []
    for extents in ([(9, 1), (3, 1)], [(0, 1), (0, 1)]):
        attention.plan(metadata_of(2, extents, [[1, 2, 3], [4, 5]], 4, captured=True))
        ((wrapper, _),) = attention._wrappers[0].parts
        assert wrapper.is_cuda_graph_enabled
        seen.append(
            [
                wrapper,
                *(
                    buffer.data_ptr()
                    for buffer in (
                        wrapper._paged_kv_indptr_buf,
                        wrapper._paged_kv_indices_buf,
                        wrapper._paged_kv_last_page_len_buf,
                        wrapper._int_workspace_buffer,
                        wrapper._float_workspace_buffer,
                    )
                ),
            ]
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "reason"),
    [
        (128, torch.bfloat16, "cuda", None),
        (64, torch.float16, "cuda", None),
        (128, torch.bfloat16, "cpu", "GPU"),
        (80, torch.bfloat16, "cuda", "head_dim 80"),
        (128, torch.float32, "cuda", "float32"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(
    head_dim: int, dtype: torch.dtype, device: str, reason: str | None
) -> None:
    said = unsupported(head_dim, dtype, torch.device(device))
    assert said is None if reason is None else reason in str(said)
