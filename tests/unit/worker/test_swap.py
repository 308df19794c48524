"""KV blocks that go to host memory and back. (tests/simulation/test_models.py checks the output after a swap.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpu_worker.build import BuiltWorker
from gpu_worker.errors import DeviceError
from gpu_worker.kv.pool import allocate_pool
from tests.support.kv_swaps import check_swaps
from tests.unit.worker.families import Reference


def test_every_byte_comes_back() -> None:
    check_swaps(torch.device("cpu"))


def test_host_blocks_that_do_not_fit_are_a_device_error() -> None:
    with pytest.raises(DeviceError, match="GiB on cpu"):
        allocate_pool(1, 128, 64, 64, 128, torch.float32, torch.device("cpu"), 2**31 - 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 0), ({"num_host_blocks": 7}, 7), ({"host_gib": 2**-10}, 64), ({"num_host_blocks": 0, "host_gib": 1.0}, 0)],
)
def test_the_size_comes_from_the_settings(
    settings: dict[str, float], expected: int, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    # 2 layers, 2 heads of 16, keys and values in float32, 32 tokens: 16 KiB a block.
    built = build(reference("llama-tied").folder, block_size=32, **settings)
    assert built.runner.limits.num_host_blocks == expected
