"""Drives the runner of an embedding model as the scheduler would."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_worker.steps.runner import ModelRunner
from paceline.v1.worker_pb2 import NewSequence, StepPlan, StepResult
from tests.unit.worker.driver import GREEDY, pack


class Inputs:
    """Drives a runner with inputs only, each in a slot of its own, in chunks of at most `chunk` tokens."""

    def __init__(self, runner: ModelRunner, chunk: int = 1000) -> None:
        self.runner, self.chunk, self.step = runner, chunk, 0
        self.freed: list[int] = []
        self.tables: dict[int, bytes] = {}  # by slot
        self._arrivals: list[NewSequence] = []
        self._next_block = 1

    def run(self, inputs: list[list[int]], cached: int = 0, blocks: bytes = b"") -> dict[int, Any]:
        """Runs steps until all inputs have vectors, and returns these by index.

        `cached`: how many of the first tokens have their KV in `blocks`.
        """
        return self.finish(self.begin(inputs, cached, blocks))

    def begin(self, inputs: list[list[int]], cached: int = 0, blocks: bytes = b"") -> dict[int, list[int]]:
        """Makes the new sequences of the next step. Returns by slot: [computed tokens, all tokens]."""
        self._arrivals = []
        for slot, tokens in enumerate(inputs):
            table = blocks or pack([self._block() for _ in range(-(-len(tokens) // self.runner.limits.block_size))])
            self.tables[slot] = table
            self._arrivals.append(
                NewSequence(
                    slot=slot, token_ids=pack(tokens), num_prompt_tokens=len(tokens), num_cached_tokens=cached,
                    block_table=table, sampling=GREEDY, request_id=f"r{slot}",
                )
            )  # fmt: skip
        return {slot: [cached, len(tokens)] for slot, tokens in enumerate(inputs)}

    def run_step(self, left: dict[int, list[int]]) -> StepResult:
        self.step += 1
        sizes = {slot: min(self.chunk, total - done) for slot, (done, total) in left.items()}
        result = self.runner.step(
            StepPlan(
                step=self.step, free_slots=pack(self.freed), new_sequences=self._arrivals,
                prefill_slots=pack(list(sizes)), prefill_tokens=pack(list(sizes.values())),
            )
        )  # fmt: skip
        self._arrivals, self.freed = [], []
        for slot, size in sizes.items():
            left[slot][0] += size
        assert result.token_ids == b"", "nothing is sampled"
        return result

    def finish(self, left: dict[int, list[int]]) -> dict[int, Any]:
        vectors = {}
        while left:
            result = self.run_step(left)
            assert not result.errors
            ended = [slot for slot, (done, total) in left.items() if done == total]
            assert sorted(one.slot for one in result.embeddings) == sorted(ended)
            for one in result.embeddings:
                vectors[one.slot] = np.frombuffer(one.values, "<f4")
                del left[one.slot]
            self.freed += ended
        return vectors

    def _block(self) -> int:
        self._next_block += 1
        return self._next_block - 1
