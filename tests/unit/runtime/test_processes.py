"""The threads that a worker chooses."""

from __future__ import annotations

import pytest

from services.runtime import processes
from services.runtime.processes import LARGE_WEIGHTS_BYTES, default_threads


@pytest.mark.parametrize(
    ("cores", "weights_bytes", "workers", "threads"),
    [
        (1, LARGE_WEIGHTS_BYTES, 1, 1),
        (2, LARGE_WEIGHTS_BYTES - 1, 1, 1),
        (2, LARGE_WEIGHTS_BYTES, 1, 2),
        (2, LARGE_WEIGHTS_BYTES, 2, 1),
        (3, LARGE_WEIGHTS_BYTES, 1, 2),
        (8, 0, 1, 7),
        (8, LARGE_WEIGHTS_BYTES, 2, 4),
        (8, 0, 3, 2),
        (2, 0, 5, 1),
    ],
)
def test_a_worker_leaves_a_core_to_others_except_with_a_large_model_on_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, weights_bytes: int, workers: int, threads: int
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    assert default_threads(weights_bytes, workers) == threads
