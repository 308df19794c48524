"""Steps that are queued on the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpu_worker.device import DeviceEvent
from gpu_worker.steps.history import SampledSlots
from gpu_worker.steps.results import Drawn, StepOutputs
from paceline.v1.worker_pb2 import StepResult


@dataclass(frozen=True, slots=True)
class StepStats:
    """The numbers of a step for the metrics."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    draft_tokens: int = 0  # rows of draft tokens and of the last tokens before them
    sequences: int = 0
    # Entries of all block tables. A block that two sequences share counts twice.
    table_blocks: int = 0


@dataclass(slots=True)
class LaunchedStep:
    """A step that is queued on the device."""

    step: int
    stats: StepStats
    started_us: int
    outputs: StepOutputs
    done: DeviceEvent
    clock: StepClock

    def result(self) -> StepResult:
        """Wait for the device. Call this in the order of the steps, from one thread."""
        self.done.wait()
        result = self.outputs.result()
        result.step = self.step
        # A step that is launched early begins when the previous step ends.
        result.started_us = max(self.started_us, self.clock.finished_us)
        result.finished_us = self.clock.finished_us = now_us()
        return result


@dataclass(frozen=True, slots=True)
class UnrecordedStep:
    """A step with tokens that are not in the history yet."""

    sampled: SampledSlots
    drawn: Drawn
    done: DeviceEvent


@dataclass(slots=True)
class StepClock:
    """When the device was last free."""

    finished_us: int = 0  # of the last step with a fetched result


def now_us() -> int:
    return time.monotonic_ns() // 1000
