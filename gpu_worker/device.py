"""Memory traffic between host and device that neither side waits for. On a CPU all of it is nothing."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class DeviceEvent:
    """A point in what a stream does, for the host or another stream to wait for."""

    def __init__(self, device: torch.device, blocking: bool = False) -> None:
        """blocking: the host will have to wait, so it shall sleep instead of spinning."""
        cuda = device.type == "cuda"
        self._event: Any = torch.cuda.Event(blocking=blocking) if cuda else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """All that was queued on the current stream so far is before the fence."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """The host waits until the device is past the last record(); if there was none, for nothing."""
        if self._event is not None:
            self._event.synchronize()

    def is_passed(self) -> bool:
        """Whether the device is past the last record()."""
        return self._event is None or bool(self._event.query())

    def hold(self) -> None:
        """What is queued on the current stream from now on comes after the last record()."""
        if self._event is not None:
            self._event.wait()


class SideStream:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        """It is the current stream meanwhile."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def pin(tensor: Tensor) -> None:
    """Lock a CPU tensor's memory for as long as it is there, so that copies between it and a GPU wait for nobody.

    Torch's own pinned memory comes in powers of two: of 40 GiB it would take 64. Raises RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pointer, portable = tensor.data_ptr(), 1
    if error := int(runtime.cudaHostRegister(pointer, tensor.nbytes, portable)):
        raise RuntimeError(f"{tensor.nbytes} bytes of host memory cannot be locked: CUDA error {error}")
    weakref.finalize(tensor, runtime.cudaHostUnregister, pointer)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, integers as int64, bytes as they are. (A copy from ordinary memory would wait for all
    that is queued. Torch does not give pinned memory away again before the copy from it is done.)"""
    if np.issubdtype(array.dtype, np.integer) and array.dtype != np.uint8:
        array = array.astype(np.int64, copy=False)
    host = torch.from_numpy(array)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def fetch(tensor: Tensor) -> Tensor:
    """The tensor in host memory: there as soon as what is queued on the current stream is done, which the caller has to
    wait for."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
