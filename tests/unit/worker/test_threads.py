"""OpenMP runs all threads of a worker, or the worker does not start; and how long they spin."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from gpu_worker.cpu.int8 import can_multiply_int8
from gpu_worker.cpu.vectors import has_vectors
from gpu_worker.device import multiplies_bfloat16

BUILD = """
from demo import CHECKPOINT
from gpu_worker.build import build_worker
from gpu_worker.settings import WorkerSettings
try:
    runner = build_worker(WorkerSettings(model=str(CHECKPOINT), device="cpu", threads={threads}, num_blocks=100)).runner
    print("built", runner.leaves_core(2))
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


SETTINGS = """
import os
from numba import threading_layer
from demo import CHECKPOINT
from gpu_worker.build import build_worker
from gpu_worker.settings import WorkerSettings
build_worker(WorkerSettings(model=str(CHECKPOINT), device="cpu", threads=2, num_blocks=100, **{options}))
assert os.environ.get("GOMP_SPINCOUNT") == {left!r}
print(threading_layer())
"""
DEFAULT_SPINS = 300_000


@pytest.mark.skipif(not has_vectors(torch.float32), reason="this CPU has no vector instructions for float32")
@pytest.mark.parametrize(
    ("options", "variable", "spins"),
    [
        ({}, "A=B", {10_000}),
        ({}, "GOMP_SPINCOUNT=77", {77}),
        ({}, "OMP_WAIT_POLICY=PASSIVE", {0}),
        ({"deterministic": True}, "A=B", set()),
        ({"quantization": "int8"}, "A=B", set()),
    ],
    ids=lambda value: str(value),
)
def test_numbas_threads_sleep_soon_if_a_step_is_one_call(
    options: dict[str, object], variable: str, spins: set[int]
) -> None:
    """Not if the operator has set how threads wait. OpenMP, when it is loaded, says what it has read."""
    if options.get("quantization") == "int8" and not can_multiply_int8():
        pytest.skip("this CPU has no AVX-512 VNNI")
    name, value = variable.split("=")
    env = {key: kept for key, kept in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", SETTINGS.format(options=options, left=value if name == "GOMP_SPINCOUNT" else None)]
    env |= {name: value, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    if done.stdout.splitlines()[-1] != "omp":
        pytest.skip("numba's threads are not OpenMP's")
    found = set(map(int, re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)))
    assert found - {DEFAULT_SPINS} == spins
    assert found, "OpenMP has said nothing"


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
