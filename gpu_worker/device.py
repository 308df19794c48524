"""Copies between host and device that block neither side. On a CPU these are no-ops."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def multiplies_bfloat16() -> bool:
    """Whether torch can multiply matrices of bfloat16 on this CPU without converting them."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class DeviceEvent:
    """A point in a stream's work. The host or another stream can wait for it."""

    def __init__(self, device: torch.device, blocking: bool = False) -> None:
        """blocking: the host sleeps when it waits, instead of spinning."""
        cuda = device.type == "cuda"
        self._event: Any = torch.cuda.Event(blocking=blocking) if cuda else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark the end of all work that is queued on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block the host until the device has passed the last record(). Without a record(), return at once."""
        if self._event is not None:
            self._event.synchronize()

    def is_passed(self) -> bool:
        """Whether the device has passed the last record()."""
        return self._event is None or bool(self._event.query())

    def hold(self) -> None:
        """Make later work of the current stream run after the last record()."""
        if self._event is not None:
            self._event.wait()


class SideStream:
    """A stream beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        """Make it the current stream inside a `with` block."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def pin(tensor: Tensor) -> None:
    """Lock a CPU tensor's memory for its lifetime, so that copies between it and a GPU do not block.

    Torch rounds its own pinned memory up to powers of two: 64 GiB instead of 40. Raises RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pointer, portable = tensor.data_ptr(), 1
    if error := int(runtime.cudaHostRegister(pointer, tensor.nbytes, portable)):
        raise RuntimeError(f"{tensor.nbytes} bytes of host memory cannot be locked: CUDA error {error}")
    weakref.finalize(tensor, runtime.cudaHostUnregister, pointer)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device: integers as int64, bytes and other types unchanged. (A copy from ordinary memory
    may wait for all queued work. Torch does not reuse the pinned memory before the copy is done.)"""
    if np.issubdtype(array.dtype, np.integer) and array.dtype != np.uint8:
        array = array.astype(np.int64, copy=False)
    host = torch.from_numpy(array)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def upload_words(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """As upload(), but int32 stays int32."""
    return upload(array.view(np.uint8), device).view(torch.int32)


def fetch(tensor: Tensor) -> Tensor:
    """Copy the tensor to host memory. The copy is complete when the work queued on the current stream is done, and the
    caller must wait for that."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
