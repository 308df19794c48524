"""A real model as a worker of the simulator's `LocalSystem`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_worker.build import build_worker
from gpu_worker.settings import WorkerSettings
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerRegistration


class ModelWorker:
    def __init__(self, path: Path, device: str = "cpu", **settings: Any) -> None:
        built = build_worker(WorkerSettings(model=str(path), device=device, threads=1, **settings))
        self.runner = built.runner
        self.num_steps = 0
        limits = built.runner.limits
        self.registration = WorkerRegistration(
            model=built.info,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            num_host_blocks=limits.num_host_blocks,
        )

    def reset(self, keeps_blocks: bool = False) -> None:
        self.runner.reset()  # what is in the blocks stays there in any case

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        return self.runner.step(plan)
