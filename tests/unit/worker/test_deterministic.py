"""With `deterministic`, a token's log probabilities are the same to the last bit in every batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gpu_worker.build import BuiltWorker
from gpu_worker.cpu.int8 import can_multiply_int8
from gpu_worker.errors import ModelError
from gpu_worker.models.matmul import PlainMatmul, TiledMatmul, check_matmul
from paceline.v1.common_pb2 import SamplingParams
from tests.unit.worker.driver import Driver, Sequence
from tests.unit.worker.families import VOCAB, Reference

References = Callable[[str], Reference]
Build = Callable[..., BuiltWorker]
Told = list[tuple[int, float, bytes, bytes]]  # by token: id, log probability, best tokens, their log probabilities

NEW_TOKENS = 6
SAMPLING = SamplingParams(top_p=1.0, max_tokens=NEW_TOKENS, logprobs=True, num_top_logprobs=8)
_rng = np.random.default_rng(8)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (1, 2, 15, 33, 40, 47, 64, 90)]


def run(driver: Driver, *sequences: Sequence) -> list[Told]:
    told: dict[int, Told] = {sequence.slot: [] for sequence in sequences}
    while not all(sequence.ended for sequence in sequences):
        for one in driver.run_step().logprobs:
            if one.slot in told:
                token = driver.running[one.slot].tokens[-1]
                told[one.slot].append((token, one.logprob, one.top_token_ids, one.top_logprobs))
        for sequence in [s for s in driver.running.values() if s.ended and s not in sequences]:
            driver.free(sequence)
    for sequence in sequences:
        driver.free(sequence)
    return [told[sequence.slot][:NEW_TOKENS] for sequence in sequences]


@pytest.fixture(params=["llama3-rope", "mistral", "qwen3", "int8", "wide"])
def runner_of(
    request: pytest.FixtureRequest, reference: References, build: Build, tmp_path: Path
) -> Callable[[], Driver]:
    settings: dict[str, Any] = {"block_size": 8, "deterministic": True}
    if request.param == "wide":  # widths at which a matmul of one row differs from one of several rows, also in float32
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(tmp_path)
        return lambda: Driver(build(tmp_path, load_format="dummy", **settings).runner, 64)
    if request.param == "int8":
        if not can_multiply_int8():
            pytest.skip("this CPU has no VNNI instructions")
        settings["quantization"] = "int8"
    folder = reference("qwen2" if request.param == "int8" else request.param).folder
    return lambda: Driver(build(folder, dtype="bfloat16", **settings).runner, 64)


def test_logprobs_depend_neither_on_the_batch_nor_on_the_chunks(runner_of: Callable[[], Driver]) -> None:
    driver = runner_of()
    alone = [run(driver, driver.add(prompt, NEW_TOKENS, SAMPLING))[0] for prompt in PROMPTS]
    assert all(len(told) == NEW_TOKENS for told in alone)
    for chunk_tokens in (64, 7, 1):
        driver.chunk_tokens = chunk_tokens
        assert run(driver, *[driver.add(prompt, NEW_TOKENS, SAMPLING) for prompt in PROMPTS]) == alone


def test_logprobs_are_the_same_after_recomputation_and_with_a_shared_prefix(runner_of: Callable[[], Driver]) -> None:
    driver = runner_of()
    prompt = PROMPTS[6]
    (whole,) = run(driver, driver.add(prompt, NEW_TOKENS, SAMPLING))
    bystander = driver.add(PROMPTS[3], 200)
    for kept in range(1, NEW_TOKENS):
        output = [token for token, *_ in whole[:kept]]
        (rest,) = run(driver, driver.add(prompt, NEW_TOKENS, SAMPLING, output))  # prefills what was decoded
        assert rest == whole[kept:]
    first = driver.add(prompt, 100)
    driver.run_step()
    driver.run_step()
    (shared,) = run(driver, driver.add(prompt, NEW_TOKENS, SAMPLING, prefix_of=first))
    assert shared == whole
    assert not bystander.ended


def test_logits_of_draft_rows_are_those_of_decode_rows(
    runner_of: Callable[[], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts are right. Other sequences decode, prefill and speculate in the same step."""
    driver = runner_of()
    decoder = driver.runner._decoder
    noted: list[torch.Tensor] = []
    logits = decoder.logits

    def note(hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        noted.append(logits(hidden, **options).clone())
        return noted[-1]

    monkeypatch.setattr(decoder, "logits", note)
    sampling = SamplingParams(top_p=1.0, max_tokens=NEW_TOKENS)
    for prompt in PROMPTS[3:6]:
        noted.clear()
        alone = driver.add(prompt, NEW_TOKENS, sampling)
        driver.run()
        by_token = torch.cat(noted)  # a step with an unfinished prompt computes no logits
        assert len(by_token) == NEW_TOKENS
        others = [driver.add(other, 200, sampling) for other in (PROMPTS[2], PROMPTS[1], PROMPTS[7])]
        sequence = driver.add(prompt, NEW_TOKENS, sampling)
        for _ in range(2):
            driver.run_step()
        num_known = len(sequence.output)
        driver.draft(others[0], [1, 2, 3])
        driver.draft(sequence, alone.output[num_known:-1])
        noted.clear()
        driver.run_step()
        assert sequence.output == alone.output
        assert torch.equal(noted[0][-(NEW_TOKENS - num_known) :], by_token[num_known:])
        for one in [*others, sequence]:
            driver.free(one)


def test_a_matmul_that_depends_on_other_rows_is_refused_at_the_start() -> None:
    class Planted(PlainMatmul):
        def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
            self.fault = fault

        def of(self, *arguments: Any, **options: Any) -> torch.Tensor:
            return self.fault(super().of(*arguments, **options))

    by_place = Planted(lambda product: product + torch.arange(len(product))[:, None])
    by_count = Planted(lambda product: product * len(product))
    weights = [torch.ones(4, 5)]
    check_matmul(TiledMatmul(), weights, weights[0])
    check_matmul(
        TiledMatmul(), [torch.tensor([[1.0, torch.nan], [2.0, 3.0]])], weights[0]
    )  # requests fail, not the start
    with pytest.raises(ModelError, match=r"products with \[4, 5\] torch.float32 depend on a row's position"):
        check_matmul(by_place, weights, weights[0])
    with pytest.raises(ModelError, match="depend on other rows"):
        check_matmul(by_count, weights, weights[0])


def test_a_tiled_matmul_equals_the_plain_matmul() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40), torch.randn(40)
    for count in (1, 31, 32, 33, 96):
        rows, total = torch.randn(count, 24), torch.randn(count, 40)
        tiled, plain = TiledMatmul(), PlainMatmul()
        torch.testing.assert_close(tiled.of(rows, weight, bias), plain.of(rows, weight, bias))
        out = torch.empty(count, 40)
        assert tiled.of(rows, weight, out=out) is out
        torch.testing.assert_close(out, plain.of(rows, weight))
        sums = total.clone(), total.clone()
        torch.testing.assert_close(tiled.added(sums[0], rows, weight), plain.added(sums[1], rows, weight))


def test_deterministic_workers_refuse_flashinfer(reference: References, build: Build) -> None:
    with pytest.raises(ModelError, match="deterministic"):
        build(reference("llama-tied").folder, deterministic=True, attention_backend="flashinfer")
