"""A stand-in for a GPU that knows when the host would have to wait for it. Tensors on torch's `meta` device have shapes
and no contents, so an operation that reads a value fails there. NoWaiting finds the other operations that wait on a GPU
by their names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.late_device.device import HostWaits
from tests.support.late_device.tensors import INDEXES, WAITS

DEVICE = torch.device("meta")
# Mistakes that make the host wait, on a tensor [4, 5] of the device.
MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.amax().item(),
    "int": lambda x: int(x.amax()),
    "branch": lambda x: 1 if x.amax() > 0 else 2,
    "all": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "flatnonzero": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "put by mask": lambda x: x.index_put_((x > 0,), torch.zeros((), device=x.device)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=x.device), 0),
    "bincount": lambda x: x[0].to(torch.int64).bincount(),
    "copy out": lambda x: torch.zeros(4, 5).copy_(x),
    "plain upload": lambda x: torch.zeros(4).to(x.device),
    "made of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "copy in": lambda x: x.copy_(torch.zeros(4, 5)),
}


class _NoLiterals(TorchFunctionMode):
    """Catches tensors made from Python numbers, which NoWaiting does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
        if made and result.device == DEVICE and not isinstance(args[0], Tensor):
            raise HostWaits(f"{func} on the device waits for the copy")
        return result


class NoWaiting(TorchDispatchMode):
    """Raises HostWaits for operations that wait, synchronous copies from the host, and all copies to the host."""

    def __enter__(self) -> NoWaiting:
        self._literals = _NoLiterals()
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._literals.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        on_device = any(tensor.device == DEVICE for tensor in tensors)
        if on_device and name in WAITS:
            raise HostWaits(f"{func} waits for its result")
        if name in INDEXES and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise HostWaits(f"{func} with a mask waits for the number of true entries")
        moved = _moved(name, args, kwargs)
        if moved is not None:
            source, target, in_background = moved
            if source.device == DEVICE and target != DEVICE:
                raise HostWaits(f"{func} from the device waits for it")
            if source.device != DEVICE and target == DEVICE and not in_background:
                raise HostWaits(f"{func} to the device waits for the copy")
        return func(*args, **kwargs)


def _moved(name: str, args: Any, kwargs: Any) -> tuple[Tensor, torch.device, bool] | None:
    """The source, the destination, and whether the copy is asynchronous. None if the operation is no copy."""
    if name == "_to_copy" and kwargs.get("device") is not None:
        return args[0], torch.device(kwargs["device"]), bool(kwargs.get("non_blocking"))
    if name == "copy_":
        return args[1], args[0].device, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return None
