"""Checkpoints, and what a CPU computes from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.unit.worker.families import Reference, make_checkpoint


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Returns the checkpoint of a model family. Each one is made once per session."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
