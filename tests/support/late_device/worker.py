"""Workers on the simulated GPU, made by build_worker() as on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from gpu_worker import build
from gpu_worker.attention import flashinfer as flashinfer_attention
from gpu_worker.attention.flashinfer import FlashInferAttention
from gpu_worker.steps.launched import LaunchedStep
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.worker_pb2 import StepPlan
from tests.support.late_device.device import STAGED_BYTES, LateDevice
from tests.support.late_device.kernels import MakeAttention, late_kernels
from tests.support.late_device.runtime import simulate

# The models of these tests are a thousand times smaller than real ones, and so is this limit.
_STAGED_BYTES = STAGED_BYTES // 1024


@contextmanager
def late_gpu(
    seed: int = 0, eagerness: float = 0.0, make_attention: MakeAttention | None = None
) -> Iterator[LateDevice]:
    """The simulated GPU, for `device="cuda"` in a worker's settings. Attention takes heads of 16, 32 or 64 elements,
    in float32 or bfloat16. ModelRunner.launch() raises HostWaits where the host would wait for the launched step."""
    launch = ModelRunner.launch
    with (
        simulate(seed, eagerness, _STAGED_BYTES) as device,
        late_kernels(device, make_attention) as flashinfer,
        pytest.MonkeyPatch.context() as patch,
    ):

        def launch_without_waits(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
            with device.no_waits():
                return launch(runner, plan)

        patch.setattr(ModelRunner, "launch", launch_without_waits)
        patch.setattr(build, "load_flashinfer", lambda: flashinfer)
        patch.setattr(build, "FlashInferAttention", partial(FlashInferAttention, workspace_bytes=1 << 20))
        patch.setattr(flashinfer_attention, "HEAD_DIMS", (16, 32, 64))
        patch.setattr(flashinfer_attention, "DTYPES", (torch.float32, torch.bfloat16))
        yield device
