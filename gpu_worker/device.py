"""Memory traffic between host and device that neither side waits for. On a CPU all of it is nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Fence:
    """A point in what the device does that the host can wait for: the end of a step, or of the device's own reading of
    memory that the host wants to write to (pinned buffers)."""

    def __init__(self, device: torch.device, blocking: bool = False) -> None:
        """blocking: a wait is expected, so sleep in it instead of spinning."""
        self._event = torch.cuda.Event(blocking=blocking) if device.type == "cuda" else None

    def record(self) -> None:
        """All that was queued on the current stream so far is before the fence."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device is past the last record(); at once if there was none."""
        if self._event is not None:
            self._event.synchronize()


def upload(array: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    """int64 on the device. A copy from ordinary memory would wait for all that is queued; torch's pinned memory is its
    own until the copy is done."""
    host = torch.from_numpy(array.astype(np.int64, copy=False))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def fetch(tensor: Tensor) -> Tensor:
    """The tensor in host memory: there as soon as what is queued on the current stream is done, which the caller has to
    wait for."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
