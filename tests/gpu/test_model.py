"""Whole models on a GPU: against transformers, graphs against eager steps, several steps in flight against one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from bench.device.load import GREEDY, SAMPLED, Load, LoadRequest
from demo import CHECKPOINT
from gpu_worker.attention.flashinfer import FlashInferAttention
from gpu_worker.memory import MIN_PIECE_BYTES, _bytes_for_graphs
from gpu_worker.steps import runner as runner_module
from gpu_worker.steps.graphs import CudaCapture
from gpu_worker.steps.pieces import piece_sizes
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from tests.gpu.models import FAMILIES, VOCAB, Checkpoint, check_near, gpu_runner
from tests.support import reference
from tests.support.grammars import GRAMMARS, Follows
from tests.unit.worker.driver import Driver

pytestmark = pytest.mark.gpu

Checkpoints = Callable[[str], Checkpoint]

NEW_TOKENS = 24
_rng = np.random.default_rng(3)
# With log probabilities, a step samples after its graph, so logits_of_steps() sees the logits.
SCORED = SamplingParams(top_p=1.0, logprobs=True, ignore_eos=True)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (1, 2, 16, 33, 64, 90, 300)]


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_on_torch_is_transformers_token_for_token(family: str, checkpoint: Checkpoints) -> None:
    reference = checkpoint(family)
    driver = Driver(gpu_runner(reference.folder, dtype="float32"), chunk_tokens=50)
    sequences = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
    driver.run()
    assert [s.output for s in sequences] == [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_structured_outputs_equal_transformers_token_for_token() -> None:
    """A row with a grammar waits for the previous token."""
    ids = reference.tokenizer(str(CHECKPOINT))("Once there was a fox")["input_ids"]
    driver = Driver(gpu_runner(CHECKPOINT, dtype="float32"))
    plain = driver.add(ids, NEW_TOKENS)
    asked = {
        name: SamplingParams(top_p=1, max_tokens=NEW_TOKENS, grammar=grammar) for name, grammar in GRAMMARS.items()
    }
    constrained = {name: driver.add(ids, NEW_TOKENS, sampling) for name, sampling in asked.items()}
    driver.run()
    assert plain.output == reference.greedy(CHECKPOINT, ids, NEW_TOKENS)
    for name, sequence in constrained.items():
        processor = LogitsProcessorList([Follows(GRAMMARS[name], len(ids))])
        expected = reference.processed(CHECKPOINT, ids, NEW_TOKENS, logits_processor=processor)
        assert sequence.output == expected, name


@pytest.mark.parametrize(("graph_max_seqs", "graph_max_tokens"), [(0, 0), (40, 0), (40, 256)])
@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_on_flashinfer_is_transformers_up_to_near_ties(
    family: str, chunk_tokens: int, graph_max_seqs: int, graph_max_tokens: int, checkpoint: Checkpoints
) -> None:
    reference = checkpoint(family)
    runner = gpu_runner(reference.folder, graph_max_seqs=graph_max_seqs, graph_max_tokens=graph_max_tokens)
    assert isinstance(runner._attention, FlashInferAttention)
    assert (runner.graphs is not None) == bool(graph_max_seqs)
    driver = Driver(runner, chunk_tokens)
    sequences = [driver.add(prompt, NEW_TOKENS + 3 * i) for i, prompt in enumerate(PROMPTS)]
    driver.run()
    equal = sum(check_near(reference, s.tokens[: s.num_prompt], s.output) for s in sequences)
    assert equal >= 0.9 * sum(len(s.output) for s in sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_bf16_is_the_same_in_any_batch(family: str, checkpoint: Checkpoints) -> None:
    driver = Driver(gpu_runner(checkpoint(family).folder, dtype="bfloat16", deterministic=True), chunk_tokens=64)
    alone = []
    for prompt in PROMPTS:
        alone.append(driver.add(prompt, NEW_TOKENS))
        driver.run()
    driver.chunk_tokens = 7
    together = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
    driver.run()
    again = [driver.add(s.tokens[: s.num_prompt], NEW_TOKENS, output=s.output[:9]) for s in alone]
    driver.run()
    assert [s.output for s in together] == [s.output for s in again] == [s.output for s in alone]


def logits_of_steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Filled while the runner runs."""
    seen: list[torch.Tensor] = []
    sample = runner_module.sample  # type: ignore[attr-defined]

    def spy(logits: torch.Tensor, *more: Any) -> Any:
        seen.append(logits.float().cpu())
        return sample(logits, *more)

    monkeypatch.setattr(runner_module, "sample", spy)
    return seen


def test_graphs_give_the_logits_of_eager_steps(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1 % in norm: a padded step is a matrix product of another shape."""
    folder = checkpoint("qwen3").folder
    seen = []
    for graph_max_seqs in (0, 40):
        with monkeypatch.context() as patch:
            runner = gpu_runner(folder, graph_max_seqs=graph_max_seqs)
            logits = logits_of_steps(runner, patch)
            driver = Driver(runner, 512)
            for prompt in PROMPTS:
                driver.add(prompt, 2, SCORED)  # one step of chunks, one of decodes
            driver.run_step()
            driver.run_step()
            seen.append(logits)
    (eager_chunks, eager), (graph_chunks, graph) = seen
    assert torch.equal(eager_chunks.argmax(-1), graph_chunks.argmax(-1)), "the earlier steps differ already"
    assert float((graph - eager).norm() / eager.norm()) < 0.01


def test_captured_pieces_give_the_logits_of_eager_steps(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 1 % in norm: a padded step is a matrix product of another shape. Chunks and decodes in one step."""
    folder = checkpoint("qwen3").folder
    seen = []
    for graph_max_tokens in (0, 512):
        with monkeypatch.context() as patch:
            runner = gpu_runner(folder, graph_max_tokens=graph_max_tokens)
            logits = logits_of_steps(runner, patch)
            driver = Driver(runner, 70)
            for prompt in PROMPTS:
                driver.add(prompt, 1 + 600 // len(prompt), SCORED)
            for _ in range(4):
                driver.run_step()
            seen.append(logits)
    eager, pieces = seen
    assert len(eager[-1]) > 4, "the last step has no decodes beside its chunk"
    compared = 0
    for one, other in zip(eager, pieces, strict=True):
        assert float((other - one).norm() / one.norm()) < 0.01
        compared += 1
        if not torch.equal(one.argmax(-1), other.argmax(-1)):
            break  # the next steps have other inputs
    assert compared > 1, "the tokens of the first step differ already"


def test_the_memory_of_captured_pieces_is_counted(checkpoint: Checkpoints) -> None:
    sizes, least = piece_sizes(512), MIN_PIECE_BYTES * 3
    runners = [gpu_runner(checkpoint("llama3").folder, graph_max_seqs=0) for _ in range(2)]
    for runner in runners:
        runner.try_largest_step()
    torch.cuda.empty_cache()
    counted = _bytes_for_graphs(runners[0].capture_pieces, sizes, least, torch.device("cuda"))
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    runners[1].capture_pieces(sizes, CudaCapture())
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert before - after <= counted + (32 << 20)


def test_a_graph_draws_the_tokens_that_are_drawn_after_it(checkpoint: Checkpoints) -> None:
    """The logits are the same, bit for bit. With log probabilities, a step samples after its graph."""
    drawn = []
    for logprobs in (False, True):
        driver = Driver(gpu_runner(checkpoint("qwen3").folder, graph_max_seqs=40), 512)
        samplings = [GREEDY, SAMPLED, SamplingParams(temperature=1.0, top_p=0.5, seed=4, ignore_eos=True)]
        sequences = []
        for i, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(logprobs=logprobs)
            sampling.MergeFrom(samplings[i % 3])
            sequences.append(driver.add(prompt, NEW_TOKENS, sampling))
        driver.run()
        drawn.append([sequence.output for sequence in sequences])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(("graph_max_seqs", "graph_max_tokens"), [(0, 0), (24, 0), (24, 256)])
def test_several_steps_in_flight_give_the_tokens_of_one(
    graph_max_seqs: int, graph_max_tokens: int, checkpoint: Checkpoints
) -> None:
    """The plans are equal, so equal kernels compute equal numbers."""
    folder = checkpoint("llama3").folder
    runner = gpu_runner(folder, graph_max_seqs=graph_max_seqs, graph_max_tokens=graph_max_tokens)
    rng = np.random.default_rng(1)
    requests = [LoadRequest(int(rng.integers(1, 200)), 0, int(rng.integers(1, 60))) for _ in range(80)]
    outputs = []
    for window in (1, 2, 3, 4):
        runner.reset()
        in_flight, tokens = [], []
        for step in Load(runner.limits, requests).steps(24):
            in_flight.append(runner.launch(step.plan))
            if len(in_flight) == window:
                tokens.append(in_flight.pop(0).result().token_ids)
        tokens += [launched.result().token_ids for launched in in_flight]
        outputs.append(tokens)
    assert all(tokens == outputs[0] for tokens in outputs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns that it is a prototype
def test_no_replayed_step_waits_for_the_device(checkpoint: Checkpoints) -> None:
    """torch raises an error for each wait that it detects. Only the second run is checked: the first one may set up
    kernels and memory."""
    runner = gpu_runner(checkpoint("llama3").folder)
    requests = [LoadRequest(20 + i, 0, 30) for i in range(24)]
    replayed = 0
    for mode in ("default", "error"):
        runner.reset()
        in_flight = []
        for step in Load(runner.limits, requests, SAMPLED).steps(24):
            torch.cuda.set_sync_debug_mode(mode if step.decodes_only else "default")
            try:
                in_flight.append(runner.launch(step.plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            replayed += mode == "error" and step.decodes_only
            if len(in_flight) == 2:
                in_flight.pop(0).result()
        for launched in in_flight:
            launched.result()
    assert replayed >= 20


def test_a_model_on_a_gpu_is_reproducible(checkpoint: Checkpoints) -> None:
    outputs = []
    for _ in range(2):
        driver = Driver(gpu_runner(checkpoint("mistral").folder), chunk_tokens=50)
        sequences = [driver.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
        driver.run()
        outputs.append([s.output for s in sequences])
    assert outputs[0] == outputs[1]
