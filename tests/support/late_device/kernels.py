"""FlashInfer on the simulated GPU: the reference kernels, which read device memory when they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import flashinfer_kernels
from tests.support.flashinfer_kernels import Fa2, Fa2Plan
from tests.support.late_device import tensors
from tests.support.late_device.device import LateDevice

# device, options of the kernel
MakeAttention = Callable[..., Fa2]


@contextmanager
def late_kernels(device: LateDevice, make_attention: MakeAttention | None = None) -> Iterator[Any]:
    """The module `flashinfer` with kernels for the device."""
    make_attention = make_attention or _LateFa2

    def late(kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: tensors.queue(device, kernel, args)

    with (
        flashinfer_kernels.reference_kernels(late, partial(make_attention, device), on_cpu=False) as flashinfer,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(flashinfer.utils, "_cache_buf", {})  # tensors of an earlier device
        yield flashinfer


class _LateFa2(Fa2):
    """plan() writes to pinned memory at once, and the device copies that to its workspace later, as FlashInfer's does.
    A graph keeps what plan() returned at its capture (batch size, page size, causal, window), so a later plan must
    return the same. Lengths may differ: kernels read them from the workspace."""

    def __init__(self, device: LateDevice, *options: Any) -> None:
        super().__init__(*options)
        self._device = device

    def plan(self, float_workspace: Tensor, int_workspace: Tensor, pinned: Tensor, *args: Any) -> Any:
        made: Fa2Plan = super().plan(float_workspace, int_workspace, pinned, *args)
        arrays = torch.cat((made.qo_indptr, made.kv_lens))
        host = pinned.view(torch.int32)[: len(arrays)]
        assert self._device.is_pinned(host)
        host.copy_(arrays)
        workspace = int_workspace.view(torch.int32)[: len(arrays)]
        tensors.copy(workspace, host, non_blocking=True)
        return (len(made.kv_lens), made.page_size, made.causal, made.window_left)

    def paged_run(self, float_workspace: Tensor, int_workspace: Tensor, plan: Any, *args: Any) -> None:
        batch_size, page_size, causal, window_left = plan

        def run(float_workspace: Tensor, int_workspace: Tensor, *args: Any) -> None:
            q, k, v, qo_indptr, kv_indptr, *rest = args
            arrays = int_workspace.view(torch.int32)[: 2 * batch_size + 1].clone()
            kv_indptr = kv_indptr[: batch_size + 1]
            made = Fa2Plan(
                arrays[: batch_size + 1], kv_indptr, arrays[batch_size + 1 :], page_size, causal, window_left
            )
            assert made.qo_indptr[0] == 0
            assert made.qo_indptr[-1] == len(q), "the workspace has the plan of another step"
            super(_LateFa2, self).paged_run(
                float_workspace, int_workspace, made, q, k, v, qo_indptr[: batch_size + 1], kv_indptr, *rest
            )

        tensors.queue(self._device, run, (float_workspace, int_workspace, *args))
