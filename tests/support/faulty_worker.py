"""A worker with planted faults, for tests: `python -m tests.support.faulty_worker serve worker ...`.

Only requests with prompts that begin with MARK cause faults. The two tokens after MARK say which: a Fault, and the
number of tokens that the request generates before the fault. The real worker has no such code.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from gpu_worker.deadline import StepWatch
from gpu_worker.sampling.sampler import SamplingRows
from gpu_worker.steps.history import SampledSlots
from gpu_worker.steps.inputs import StepInput
from gpu_worker.steps.launched import LaunchedStep
from gpu_worker.steps.results import Drawn, StepOutputs, VerifiedDrafts
from gpu_worker.steps.rows import StepRows
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.worker_pb2 import StepPlan
from services.cli.main import main

MARK = [991, 17, 993]


class Fault(enum.IntEnum):
    RAISE = 101  # an exception out of the forward pass
    NAN = 102  # in the row's logits
    HANG = 103  # the forward pass never returns
    DIE = 104  # the process is killed in the forward pass
    SULK = 105  # as HANG, and the worker does not check how long a step takes


def poison(fault: Fault, after: int, *rest: int) -> list[int]:
    """A prompt that brings about the fault when it has generated `after` tokens."""
    return [*MARK, fault, after, *rest]


class FaultyRunner(ModelRunner):
    _faults: dict[int, tuple[Fault, int]]  # by slot: which, and at which number of computed tokens

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._faults = {} if plan.step == 1 else self._faults
        for slot in np.frombuffer(plan.free_slots, np.int32).tolist():
            self._faults.pop(slot, None)
        for sequence in plan.new_sequences:
            tokens = np.frombuffer(sequence.token_ids, np.int32)[:5].tolist()
            if tokens[:3] == MARK:
                self._faults[sequence.slot] = Fault(tokens[3]), sequence.num_prompt_tokens + tokens[4]
        if self._faults:
            self._repeated = None  # the next step calls _forward()
        return super().launch(plan)

    def _due(self, rows: StepRows) -> dict[int, Fault]:
        """The faults of this step, by slot."""
        ends = dict(zip(rows.slots.tolist(), (rows.starts + rows.counts).tolist(), strict=True))
        return {slot: fault for slot, (fault, at) in self._faults.items() if ends.get(slot, 0) >= at}

    def _forward(self, rows: StepRows, sampled: SampledSlots) -> StepOutputs:
        for fault in self._due(rows).values():
            match fault:
                case Fault.RAISE:
                    raise ValueError("a planted fault")
                case Fault.HANG:
                    threading.Event().wait()
                case Fault.SULK:
                    StepWatch.passed = lambda *_: None  # type: ignore[method-assign]
                    threading.Event().wait()
                case Fault.DIE:
                    os.kill(os.getpid(), signal.SIGKILL)
        return super()._forward(rows, sampled)

    def _sample(self, rows: StepRows, step: StepInput, logits: Tensor, *options: Any) -> Drawn:
        due = self._due(rows)
        for row, slot in enumerate(rows.slots[rows.samples].tolist()):
            if due.get(slot) is Fault.NAN:
                logits[row] = float("nan")
        return super()._sample(rows, step, logits, *options)

    def _drawn(
        self, rows: StepRows, step: StepInput, parameters: SamplingRows, tokens: Tensor, failed: Tensor
    ) -> Drawn:
        due = self._due(rows)
        for row, slot in enumerate(rows.slots[rows.samples].tolist()):
            if due.get(slot) is Fault.NAN:
                tokens[row], failed[row] = 0, True  # there are no logits
        return super()._drawn(rows, step, parameters, tokens, failed)

    def _verify(self, rows: StepRows, logits: Iterator[Tensor]) -> VerifiedDrafts:
        positions = [
            (slot, start + i + 1)
            for slot, start, count in zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True)
            for i in range(count)
        ][-rows.num_draft_rows :]

        def poisoned() -> Iterator[Tensor]:
            left = iter(positions)
            for piece in logits:
                for row, (slot, end) in zip(piece, left, strict=False):
                    fault, at = self._faults.get(slot, (None, 0))
                    if fault is Fault.NAN and end >= at:
                        row.fill_(float("nan"))
                yield piece

        return super()._verify(rows, poisoned())


if __name__ == "__main__":
    import gpu_worker.build

    gpu_worker.build.ModelRunner = FaultyRunner  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
