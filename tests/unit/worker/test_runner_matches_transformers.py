"""Greedy output is that of transformers' `generate`, token for token: with any chunks, after a prefix hit, and after a
preemption."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_worker.build import BuiltWorker
from tests.unit.worker.driver import Driver
from tests.unit.worker.families import FAMILIES, VOCAB, Reference

References = Callable[[str], Reference]
Build = Callable[..., BuiltWorker]

NEW_TOKENS = 12
_rng = np.random.default_rng(5)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (1, 2, 16, 33, 64, 90)]


@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_mixed_lengths_equals_transformers(
    family: str, block_size: int, chunk_tokens: int, reference: References, build: Build
) -> None:
    checkpoint = reference(family)
    driver = Driver(build(checkpoint.folder, block_size=block_size).runner, chunk_tokens)
    sequences = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
    driver.run()
    assert [s.output for s in sequences] == [checkpoint.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_the_reference_is_not_one_token_over_and_over(reference: References) -> None:
    for family in FAMILIES:
        assert all(len(set(reference(family).greedy(p, NEW_TOKENS))) > 2 for p in PROMPTS), family


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("family", ["llama3-rope", "mistral"])
def test_output_after_a_prefix_hit_equals_transformers(
    family: str, block_size: int, reference: References, build: Build
) -> None:
    checkpoint = reference(family)
    driver = Driver(build(checkpoint.folder, block_size=block_size).runner, 64)
    first = driver.add(PROMPTS[5], NEW_TOKENS)
    for _ in range(3):
        driver.run_step()
    prompts = [[*PROMPTS[5][:50], 3, 4, 5], PROMPTS[5], PROMPTS[5][:41], [*PROMPTS[5][:80], *PROMPTS[4]]]
    others = [driver.add(prompt, NEW_TOKENS, prefix_of=first) for prompt in prompts]
    assert all(s.shared_blocks >= 40 // block_size for s in others)
    while not first.ended or not all(s.ended for s in others):
        driver.run_step()
        for sequence in [s for s in driver.running.values() if s.ended and s is not first]:
            driver.free(sequence)
    assert first.output[:NEW_TOKENS] == checkpoint.greedy(PROMPTS[5], NEW_TOKENS)
    assert [s.output for s in others] == [checkpoint.greedy(prompt, NEW_TOKENS) for prompt in prompts]


def test_slots_and_blocks_are_used_again(reference: References, build: Build) -> None:
    """Three waves use three slots. One plan frees a slot and fills it again. The pool holds one wave,
    but not two."""
    checkpoint = reference("llama-tied")
    driver = Driver(build(checkpoint.folder, block_size=8, max_num_seqs=3, num_blocks=34).runner, 64)
    for wave in ([3, 4, 1], [5, 0, 2], [4, 3, 2]):
        sequences = [driver.add(PROMPTS[i], NEW_TOKENS) for i in wave]
        driver.run()
        assert [s.output for s in sequences] == [checkpoint.greedy(PROMPTS[i], NEW_TOKENS) for i in wave]
        assert len(driver.free_blocks) == 34


@pytest.mark.parametrize("family", ["llama-tied", "mistral"])
def test_a_resumed_sequence_continues_with_the_same_tokens(family: str, reference: References, build: Build) -> None:
    checkpoint = reference(family)
    driver = Driver(build(checkpoint.folder, block_size=16).runner, 7)
    bystander = driver.add(PROMPTS[3], 40)
    victim = driver.add(PROMPTS[4], NEW_TOKENS)
    while len(victim.output) < 5:
        driver.run_step()
    output = victim.output
    driver.free(victim)
    driver.run_step()
    resumed = driver.add(PROMPTS[4], NEW_TOKENS, output=output)
    driver.run()
    assert resumed.output == checkpoint.greedy(PROMPTS[4], NEW_TOKENS)
    assert bystander.output == checkpoint.greedy(PROMPTS[3], 40)


def test_late_arrivals_mix_with_decodes(reference: References, build: Build) -> None:
    checkpoint = reference("qwen3")
    driver = Driver(build(checkpoint.folder, block_size=16).runner, 10)
    sequences = []
    for prompt in PROMPTS:
        sequences.append(driver.add(prompt, 30))
        driver.run_step()
        driver.run_step()
    driver.run()
    assert [s.output for s in sequences] == [checkpoint.greedy(prompt, 30) for prompt in PROMPTS]
