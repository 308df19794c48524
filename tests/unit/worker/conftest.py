"""Fixtures that make checkpoints and build workers on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.build import BuiltWorker, build_worker
from gpu_worker.settings import WorkerSettings
from tests.unit.worker.families import Reference, make_checkpoint


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Returns the checkpoint of a model family. Each one is made once per session."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def build() -> Callable[..., BuiltWorker]:
    def make(folder: Path, **settings: Any) -> BuiltWorker:
        defaults = {"threads": 1, "max_num_seqs": 40, "num_blocks": 2000, "device": "cpu"}
        return build_worker(WorkerSettings(model=str(folder), **{**defaults, **settings}))

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
