"""Skips tests marked `gpu` where there is no NVIDIA GPU, and gives the others FlashInfer and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_worker.attention.flashinfer import load_flashinfer
from tests.gpu.models import Checkpoint, make_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = f"no NVIDIA GPU here: torch {torch.__version__} sees no CUDA device"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def flashinfer() -> Any:
    return load_flashinfer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A family's checkpoint and its reference, made once a session."""
    made: dict[str, Checkpoint] = {}

    def get(family: str) -> Checkpoint:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get
