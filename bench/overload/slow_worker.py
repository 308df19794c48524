"""A worker with steps that take longer than their computation: `python -m bench.overload.slow_worker serve worker ...`.

Workers on a machine with few cores share the CPU, so no placement can make them faster together. This worker computes a
step and then sleeps, as if it had a device of its own.
"""

from __future__ import annotations

import sys
import time

from gpu_worker.steps.launched import LaunchedStep
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.worker_pb2 import StepPlan
from services.cli.main import main

# Added to a step. A prompt of 1,500 tokens takes 0.32 s, a step of 32 rows 84 ms, one of 16 rows 52 ms.
BASE_S, TOKEN_S, ROW_S = 20e-3, 200e-6, 2e-3


def slow_down() -> None:
    launch = ModelRunner.launch

    def slow(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        launched = launch(self, plan)
        stats = launched.stats
        time.sleep(BASE_S + TOKEN_S * stats.prefill_tokens + ROW_S * stats.sequences)
        return launched

    ModelRunner.launch = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    sys.exit(main())
