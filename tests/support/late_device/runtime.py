"""torch's interface to CUDA, for the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.late_device import tensors
from tests.support.late_device.device import DEVICE, STAGED_BYTES, GraphPool, LateDevice, LateEvent, poison
from tests.support.late_device.graphs import LateGraph
from tests.support.late_device.tensors import LateTensor

_MAKES = (torch.zeros, torch.ones, torch.full, torch.arange, torch.empty, torch.tensor, torch.as_tensor)
_FROM_HOST = (torch.tensor, torch.as_tensor)


@contextmanager
def simulate(seed: int = 0, eagerness: float = 0.0, staged_bytes: int = STAGED_BYTES) -> Iterator[LateDevice]:
    """The device, which is DEVICE for torch. The arguments are those of LateDevice."""
    device = LateDevice(seed, eagerness, staged_bytes)
    with pytest.MonkeyPatch.context() as patch, _Placement(device):
        for name, value in _cuda(device).items():
            patch.setattr(torch.cuda, name, value)
        yield device


def _cuda(device: LateDevice) -> dict[str, Any]:
    def pin(pointer: int, num_bytes: int, flags: int) -> int:
        device.pin_range(pointer, num_bytes)
        return 0

    def capture(graph: LateGraph, pool: GraphPool | None = None) -> AbstractContextManager[None]:
        return graph.capturing(pool)

    return {
        "Event": _class("Event", lambda blocking=False: LateEvent(device, blocking)),
        "Stream": _class("Stream", lambda where=None: device.new_stream()),
        "stream": device.on,
        "CUDAGraph": _class("CUDAGraph", lambda: LateGraph(device)),
        "graph": capture,
        "graph_pool_handle": GraphPool,
        "synchronize": lambda where=None: device.synchronize("torch.cuda.synchronize()"),
        "empty_cache": lambda: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=lambda pointer: 0),
        "is_available": lambda: True,
        "current_device": lambda: DEVICE.index,
        "device": lambda where: nullcontext(),
        "is_current_stream_capturing": lambda: device.recorder is not None,
        "mem_get_info": lambda where=None: (1 << 40, 1 << 40),
        "get_device_properties": lambda where: SimpleNamespace(major=9, minor=0),
        "get_device_capability": lambda where=None: (9, 0),
    }


def _class(name: str, make: Callable[..., object]) -> type:
    """A class, because a module that is imported meanwhile may name it in its annotations."""
    return type(name, (), {"__new__": lambda cls, *args, **kwargs: make(*args, **kwargs)})


class _Placement(TorchFunctionMode):
    """Makes tensors on the device, and pinned tensors on the host."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKES:
            return self._make(func, args, dict(kwargs))
        if func is Tensor.pin_memory:
            return self._device.pin(args[0].clone())
        if func is Tensor.to:
            return self._to(args, kwargs)
        if func is Tensor.cpu and isinstance(args[0], LateTensor):
            return self._to((args[0], "cpu"), {})
        return func(*args, **kwargs)

    def _make(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        where, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if where is None or torch.device(where).type != "cuda":
            made = func(*args, **kwargs, **({} if where is None else {"device": where}))
            if pinned:
                self._device.pin(made)
            if func is torch.empty and not isinstance(made, LateTensor):
                poison(made)
            return made
        if func in _FROM_HOST:
            self._device.synchronize(f"{func.__name__}() on the device")
        content = func(*args, **kwargs)
        made = tensors.new(self._device, torch.empty_like(content))
        if func is not torch.empty:
            tensors.queue(self._device, Tensor.copy_, (made, content))
        return made

    def _to(self, args: Any, kwargs: Any) -> Any:
        source, where, dtype, non_blocking, must_copy = _read_to(*args, **kwargs)
        if where is None or (where.type == "cuda") == isinstance(source, LateTensor):
            if where is not None:
                kwargs = {"dtype": dtype or source.dtype, "copy": must_copy}
                args = (source,)
            return Tensor.to(*args, **kwargs)
        if isinstance(source, LateTensor):
            return tensors.to(source, where, dtype, non_blocking)
        made = tensors.new(self._device, torch.empty_like(source))
        tensors.copy(made, source, non_blocking)
        return made if dtype is None else Tensor.to(made, dtype)


def _read_to(
    source: Tensor, *places: Any, dtype: torch.dtype | None = None, device: Any = None, non_blocking: bool = False,
    copy: bool = False,
) -> tuple[Tensor, torch.device | None, torch.dtype | None, bool, bool]:  # fmt: skip
    """The arguments of Tensor.to(), which has several forms."""
    for place in places:
        if isinstance(place, torch.dtype):
            dtype = place
        elif isinstance(place, Tensor):
            device, dtype = place.device, place.dtype
        elif isinstance(place, bool):
            non_blocking = place
        else:
            device = place
    return source, None if device is None else torch.device(device), dtype, non_blocking, copy
