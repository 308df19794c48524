"""A stand-in for a GPU that knows when the host would have to wait for it. Tensors on torch's `meta` device have shapes
and no contents, so an operation that reads a value fails there. NoWaiting finds the other operations that wait on a GPU
by their names and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
# The shape of their result, or the result itself, depends on values.
_WAITS = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "masked_scatter", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "repeat_interleave", "histc", "isin", "allclose",
)  # fmt: skip
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


class HostWaits(AssertionError):
    pass


class _NoLiterals(TorchFunctionMode):
    """Catches tensors made from Python numbers, which NoWaiting does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
        if made and result.device == DEVICE and not isinstance(args[0], Tensor):
            raise HostWaits(f"{func} on the device waits for the copy")
        return result


class NoWaiting(TorchDispatchMode):
    """Raises HostWaits. Copies from the host have to be asynchronous, and nothing comes back."""

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
        if on_device and name in _WAITS:
            raise HostWaits(f"{func} waits for its result")
        if name in _INDEXES and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
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
