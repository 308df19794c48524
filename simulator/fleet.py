"""Simulated workers of a cluster. They compute nothing, and say how long a real worker would have taken.

A step's time is linear in its new tokens, in the context that its rows attend to, and in its rows. Prefill attention
adds a quadratic term, and each step varies by a few percent, so a linear model that is fitted to the steps is not
exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.v1.common_pb2 import ModelInfo
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration

BLOCK_SIZE = 16  # tokens
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8192
VOCAB = (1 << 31) - 1
EOS = 0
# Tokens: the model's limit. For a worker with fewer than 8,192 blocks, the size of its pool is the lower limit.
MAX_MODEL_LEN = 1 << 17

Ints = npt.NDArray[np.int64]


class StepCost(NamedTuple):
    """Seconds of a step: `base + new·prompt tokens + context·attended tokens + row·rows + pair·pairs of prefills`.

    The default is Llama-3.1-8B in bf16 on one H200, fitted to sums of the kernel times that NVIDIA's aiconfigurator
    ships for vLLM 0.24: 4.62 ms for one row, 14.7 ms for 256 rows of 1,024 tokens, 20.5 ms for 128 rows of 4,096,
    166 ms for 8 prompts of 1,024 tokens and 189 ms for one of 8,192. The fit is within 6 % of each.
    """

    base_s: float = 4.6e-3
    new_s: float = 19.5e-6  # for each prompt token
    context_s: float = 28.5e-9  # for each token that a decoding row attends to
    row_s: float = 10e-6  # for each decoding row
    pair_s: float = 0.8e-9  # for each pair of a prompt token and a token before it

    def step_s(self, prompt_tokens: int, context_tokens: int, rows: int, pairs: int) -> float:
        linear = self.base_s + self.new_s * prompt_tokens + self.context_s * context_tokens + self.row_s * rows
        return linear + self.pair_s * pairs

    def faster(self, factor: float) -> StepCost:
        return StepCost(*(seconds / factor for seconds in self))


H200_8B = StepCost()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker of a fleet.

    `num_blocks` is smaller than an H200's 52,000, so that a run of a minute fills the pool as hours fill the real one.
    """

    cost: StepCost = H200_8B
    num_blocks: int = 12_500
    joins_s: float = 0.0
    dies_s: float = float("inf")

    def altered(self, **changes: object) -> WorkerSpec:
        return replace(self, **changes)  # type: ignore[arg-type]


def sampled_tokens(numbers: Ints, positions: Ints, lengths: Ints) -> npt.NDArray[np.int32]:
    """What the requests with these numbers generate at these output positions. The last token of a request is EOS.
    Deterministic, so that a client knows what it must get; hardly ever the same for two requests."""
    tokens = 1 + (numbers * 2_654_435_761 + positions * 40_503 + 12_345) % (VOCAB - 1)
    return np.where(positions == lengths - 1, EOS, tokens).astype(np.int32)


class TimedWorker:
    """Runs plans by arithmetic on arrays of slots.

    A request's sampling seed is its output length: the worker ends the sequence there, and the scheduler does not know
    the length before. `run` returns the step's result and the step's seconds; the caller fills the times into the
    result.
    """

    def __init__(self, name: str, spec: WorkerSpec, seed: int, jitter: float) -> None:
        self.name = name
        self.spec = spec
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_sampled = 0
        self.num_prompt_tokens = 0  # prompt tokens computed so far
        self._jitter = jitter
        self._rng = np.random.default_rng(seed)
        self._numbers = np.zeros(MAX_NUM_SEQS, np.int64)  # the request in each slot
        self._prompts = np.zeros(MAX_NUM_SEQS, np.int64)  # prompt tokens of that request
        self._lengths = np.zeros(MAX_NUM_SEQS, np.int64)  # output tokens of that request
        self._known = np.zeros(MAX_NUM_SEQS, np.int64)  # tokens of the sequence, sampled ones included
        self._computed = np.zeros(MAX_NUM_SEQS, np.int64)
        self._decodes = np.zeros(MAX_NUM_SEQS, bool)
        self._paused = np.zeros(MAX_NUM_SEQS, bool)

    def registration(self) -> WorkerRegistration:
        return WorkerRegistration(
            name=self.name,
            model=ModelInfo(
                name="simulated",
                fingerprint="simulated",
                vocab_size=VOCAB,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=[EOS],
            ),
            block_size=BLOCK_SIZE,
            num_blocks=self.spec.num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            incarnation=self.name,
        )

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        if plan.free_slots:
            freed = _ints(plan.free_slots)
            self._decodes[freed] = self._paused[freed] = False
        for new in plan.new_sequences:
            slot = new.slot
            self._numbers[slot] = int(new.request_id)
            self._prompts[slot] = new.num_prompt_tokens
            self._lengths[slot] = new.sampling.seed
            self._known[slot] = len(new.token_ids) // 4
            self._computed[slot] = new.num_cached_tokens
            self._decodes[slot] = self._paused[slot] = False
        if plan.hold_slots:
            self._paused[_ints(plan.hold_slots)] = True
        if plan.resume_slots:
            self._paused[_ints(plan.resume_slots)] = False
        decoding = np.flatnonzero(self._decodes & ~self._paused) if not plan.skip_decodes else np.empty(0, np.int64)
        context = int(self._known[decoding].sum())
        self._computed[decoding] += 1
        sampling, prompt_tokens, pairs = decoding, 0, 0
        if plan.prefill_slots:
            slots, sizes = _ints(plan.prefill_slots), _ints(plan.prefill_tokens)
            prompt_tokens = int(sizes.sum())
            pairs = int((sizes * self._computed[slots] + sizes * sizes // 2).sum())
            self._computed[slots] += sizes
            ended = slots[self._computed[slots] == self._known[slots]]
            self._decodes[ended] = True
            sampling = np.concatenate((decoding, ended))
        positions = self._known[sampling] - self._prompts[sampling]
        tokens = sampled_tokens(self._numbers[sampling], positions, self._lengths[sampling])
        self._known[sampling] += 1
        seconds = self.spec.cost.step_s(prompt_tokens, context, len(decoding), pairs)
        seconds *= 1 + self._jitter * float(self._rng.uniform(-1, 1))
        self.busy_s += seconds
        self.num_steps += 1
        self.num_sampled += len(sampling)
        self.num_prompt_tokens += prompt_tokens
        return StepResult(step=plan.step, token_ids=tokens.tobytes()), seconds


def _ints(packed: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(packed, np.int32)
