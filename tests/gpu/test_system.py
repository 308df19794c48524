"""The real scheduler and cache cores over a worker on a GPU, with steps in flight: swaps, copies and forks.

tests/support/launched_system.py has the requests. tests/contract/worker/late_device runs them on a simulated GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.models import VOCAB, Checkpoint, check_near
from tests.support.launched_system import check_moved, make_prompts, run_system

pytestmark = pytest.mark.gpu

Checkpoints = Callable[[str], Checkpoint]

NEW_TOKENS = 40
PROMPTS = make_prompts(VOCAB)


@pytest.mark.parametrize("preset", ["paceline", "vllm-v0"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_float32_gives_the_same_tokens_as_a_cpu(preset: str, window: int, checkpoint: Checkpoints) -> None:
    reference = checkpoint("llama3")
    _, expected = run_system(reference.folder, "cpu", preset, 1, PROMPTS, NEW_TOKENS, dtype="float32")
    for i, prompt in enumerate(PROMPTS, 1):
        assert expected[i] == reference.greedy(prompt, NEW_TOKENS)
    system, tokens = run_system(reference.folder, "cuda", preset, window, PROMPTS, NEW_TOKENS, dtype="float32")
    assert tokens == expected
    check_moved(system)


@pytest.mark.parametrize("family", ["llama3", "mistral"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_bf16_on_flashinfer_is_transformers_up_to_near_ties(family: str, window: int, checkpoint: Checkpoints) -> None:
    reference = checkpoint(family)
    system, tokens = run_system(reference.folder, "cuda", "paceline", window, PROMPTS, NEW_TOKENS, dtype="bfloat16")
    per_wave = len(tokens) // 2
    equal = sum(
        check_near(reference, prompt, tokens[wave * per_wave + i])
        for wave in range(2)
        for i, prompt in enumerate(PROMPTS, 1)
    )
    assert equal >= 0.9 * 2 * len(PROMPTS) * NEW_TOKENS
    check_moved(system)
