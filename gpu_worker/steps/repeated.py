"""Steps that repeat the last one: the same decodes, each one token further."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_worker.sampling.sampler import SamplingRows
from gpu_worker.steps.history import SampledSlots
from gpu_worker.steps.inputs import StepInput
from gpu_worker.steps.rows import StepRows
from paceline.v1.worker_pb2 import StepPlan


@dataclass(slots=True)
class RepeatedStep:
    """A step of decodes on a CPU, for plans that change nothing: its arrays are advanced in place. To make them anew
    takes 0.3 ms, a tenth of a step of one row with a small model.

    Whatever else a plan has, also a block for a sequence, ends the repetition."""

    rows: StepRows
    sampled: SampledSlots
    step: StepInput
    parameters: SamplingRows
    only_largest: bool
    left: int  # steps until a sequence needs another block, or is at its longest

    def takes(self, plan: StepPlan) -> bool:
        return self.left > 0 and len(plan.ListFields()) == 1  # the number of the step

    def advance(self) -> None:
        """Call this before the next step, when the tokens of the last one are in the history. The attention backend
        advances its own arrays."""
        self.left -= 1
        positions: np.ndarray = self.step.positions.numpy()
        for array in (positions, self.parameters.position, self.sampled.positions):
            array += 1
