"""If OpenMP runs fewer threads than a worker asks for, the worker does not start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpu_worker.device import multiplies_bfloat16

BUILD = """
from demo import CHECKPOINT
from gpu_worker.build import build_worker
from gpu_worker.settings import WorkerSettings
try:
    runner = build_worker(WorkerSettings(model=str(CHECKPOINT), device="cpu", threads={threads}, num_blocks=100)).runner
    print("built", runner.leaves_core)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU does not multiply bfloat16")
@pytest.mark.parametrize(
    ("variable", "threads", "answer"),
    [
        ("OMP_THREAD_LIMIT=1", 2, "ModelError: OpenMP does not always run the 2 threads of this worker"),
        ("OMP_DYNAMIC=TRUE", 2, "ModelError: OpenMP does not always run the 2 threads of this worker"),
        ("OMP_THREAD_LIMIT=1", 1, "built"),
        ("OMP_NUM_THREADS=1", 2, "built"),
    ],
)
def test_openmp_must_run_all_threads_of_a_worker(variable: str, threads: int, answer: str) -> None:
    """Whether its steps leave a core to other threads depends on the number of cores."""
    if answer == "built":
        answer = f"built {threads < len(os.sched_getaffinity(0))}"
    name, value = variable.split("=")
    command = [sys.executable, "-c", BUILD.format(threads=threads)]
    done = subprocess.run(
        command, env=os.environ | {name: value}, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[-1].startswith(answer)


CHECK = """
import torch
from gpu_worker.cpu.matmul import check_threads
torch.set_num_threads({threads})
try:
    check_threads()
    print("checked")
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("instructions", ["AVX2", "DEFAULT"])  # AVX2: products of float32 instead of bfloat16
@pytest.mark.parametrize(
    ("limit", "threads", "answer"),
    [(32, 64, "ModelError"), (63, 64, "ModelError"), (64, 64, "checked"), (1, 1, "checked")],
)
def test_one_missing_thread_of_many_is_noticed(instructions: str, limit: int, threads: int, answer: str) -> None:
    environment = os.environ | {"OMP_THREAD_LIMIT": str(limit), "ONEDNN_MAX_CPU_ISA": instructions}
    command = [sys.executable, "-c", CHECK.format(threads=threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == answer
