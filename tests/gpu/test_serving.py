"""What must hold of a worker on a GPU under load: swaps beside the computation, seeds, cancels, no leak."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpu_worker.kv.pool import allocate_pool
from gpu_worker.kv.swap import SWAP_BATCH_BLOCKS
from gpu_worker.sampling.sampler import SamplingRows, sample
from gpu_worker.steps.slots import SlotBuffers
from paceline.v1.common_pb2 import SamplingParams
from tests.gpu.models import VOCAB, Checkpoint, gpu_runner
from tests.support.kv_swaps import check_swaps
from tests.unit.worker.driver import Driver, Sequence

pytestmark = pytest.mark.gpu

Checkpoints = Callable[[str], Checkpoint]
DEVICE = torch.device("cuda")


def test_swapped_blocks_come_back() -> None:
    for _ in range(20):  # copies that do not wait for one another would lose a race sooner or later
        check_swaps(DEVICE)


def test_swaps_wait_for_the_steps_before_them_and_later_steps_wait_for_swaps() -> None:
    """In each round, long kernels run before the first write. So a copy that did not wait would see the old
    contents."""
    count = 2 * SWAP_BATCH_BLOCKS + 7
    pool = allocate_pool(2 * count, 16, 2, 2, 64, torch.bfloat16, DEVICE, count)
    assert pool.host.is_pinned()
    there = np.arange(1, count + 1, dtype=np.int32)
    back = there + count
    slow = torch.randn(4096, 4096, device=DEVICE)
    for value in range(1, 11):
        for _ in range(20):
            slow = torch.tanh(slow @ slow)
        pool.storage[:, :, 1 : count + 1].fill_(value)
        pool.swap_out(there, there[::-1].copy())
        pool.clear(np.arange(1, 2 * count + 1, dtype=np.int32))
        pool.swap_in(there[::-1].copy(), back)
        seen = pool.storage[:, :, count + 1 :].clone()
        pool.storage[:, :, count + 1 :].fill_(-value)
        assert (seen == value).all()
        assert (pool.storage[:, :, 1 : count + 1] == 0).all()


SEEDED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1234)


def test_a_seed_gives_the_same_tokens_in_any_batch(checkpoint: Checkpoints) -> None:
    """The test uses float32: there, the rounding differences between batch shapes are too small to change a sampled
    token."""
    runner = gpu_runner(checkpoint("llama3").folder, dtype="float32")
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 30).tolist()
    outputs = []
    for company in (0, 1, 7, 30):
        runner.reset()
        driver = Driver(runner, 64)
        for i in range(company):
            other = SamplingParams(temperature=0.8, top_p=0.95, seed=i)
            driver.add(rng.integers(0, VOCAB, 5 + i).tolist(), 30, other)
        seeded = driver.add(prompt, 40, SEEDED)
        driver.run()
        outputs.append(seeded.output)
    assert len({tuple(output) for output in outputs}) == 1


def test_a_row_is_sampled_alike_wherever_it_stands() -> None:
    """Sampling alone, on equal logits."""
    torch.manual_seed(0)
    row = torch.randn(1, 128_256, device=DEVICE).mul_(3).bfloat16()
    runner_rows = 40
    tokens = set()
    for place in (0, 7, 39):
        logits = torch.randn(runner_rows, 128_256, device=DEVICE).bfloat16()
        logits[place] = row
        sampled = sample(logits, _sampling_rows(place, runner_rows))
        tokens.add(int(sampled.tokens[place]))
    assert len(tokens) == 1


def _sampling_rows(place: int, count: int) -> SamplingRows:
    """Sampling parameters of `count` prompts that one step prefills, from SlotBuffers. The row `place` has SEEDED, and
    its token has position 77."""
    from gpu_worker.steps.slots import SlotLimits
    from paceline.v1.worker_pb2 import NewSequence, StepPlan
    from tests.unit.worker.driver import pack

    table = SlotBuffers(SlotLimits(count, 8192, 256, 16, 1000, 128_256, ()))
    sequences = []
    for slot in range(count):
        length = 77 if slot == place else 10 + slot
        sampling = SEEDED if slot == place else SamplingParams(temperature=0.5 + slot / 50, top_p=0.8, seed=slot)
        blocks = pack(range(1 + 6 * slot, 6 + 6 * slot))
        sequences.append(
            NewSequence(
                slot=slot,
                token_ids=pack(range(length)),
                num_prompt_tokens=length,
                block_table=blocks,
                sampling=sampling,
            )
        )
    lengths = [77 if slot == place else 10 + slot for slot in range(count)]
    plan = StepPlan(step=1, new_sequences=sequences, prefill_slots=pack(range(count)), prefill_tokens=pack(lengths))
    return table.sampling_rows(table.apply(plan))


def test_a_thousand_mixed_requests_with_cancels(checkpoint: Checkpoints) -> None:
    """No request fails, no value is NaN, every block is freed, and memory does not grow."""
    runner = gpu_runner(checkpoint("qwen3").folder, num_blocks=700)
    rng = random.Random(0)
    driver = Driver(runner, chunk_tokens=90)
    allocated: list[int] = []
    looks = [300, 1000]  # numbers of started requests at which the allocated memory is measured
    started = finished = cancelled = 0
    while started < 1000 or driver.running:
        while started < 1000 and len(driver.running) < rng.randint(1, 40) and len(driver.free_blocks) > 60:
            _start(driver, rng)
            started += 1
        result = driver.run_step()
        assert not result.errors
        for sequence in list(driver.running.values()):
            if sequence.ended:
                driver.free(sequence)
                finished += 1
            elif rng.random() < 0.004:
                driver.free(sequence)
                cancelled += 1
        if looks and started >= looks[0]:
            looks.pop(0)
            gc.collect()
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
    driver.run_step()
    assert finished + cancelled == 1000
    assert cancelled > 30
    assert len(driver.free_blocks) == 700
    assert runner.request_ids() == []
    assert allocated[-1] <= allocated[0] + (8 << 20)
    assert runner._pool.storage.isfinite().all()


def _start(driver: Driver, rng: random.Random) -> Sequence:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 17, 60, 200]))]
    temperature = rng.choice([0.0, 0.0, 0.7, 1.3])
    sampling = SamplingParams(
        temperature=temperature, top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 40]), seed=rng.randrange(2**32)
    )
    return driver.add(prompt, rng.randint(1, 60), sampling)
