"""Tensors of the simulated GPU, and what becomes of the operations on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.late_device.device import DEVICE, Allocation, DeviceMemory, LateDevice

# The host waits in these operations: it reads values, for example to know the shape of the result.
WAITS = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "masked_scatter", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "repeat_interleave", "histc", "isin", "allclose",
)  # fmt: skip
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


class LateTensor(Tensor):
    """A tensor on the simulated GPU. `content` has its numbers, on the CPU: only queued operations may read that."""

    content: Tensor
    memory: DeviceMemory

    @staticmethod
    def __new__(cls, content: Tensor, memory: DeviceMemory) -> LateTensor:
        made: LateTensor = Tensor._make_wrapper_subclass(
            cls, content.shape, strides=content.stride(), storage_offset=content.storage_offset(), dtype=content.dtype
        )
        made.content, made.memory = content, memory
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LateTensor({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        assert force, "numpy() of a tensor on a GPU"
        self.memory.device.synchronize("numpy()")
        return self.content.numpy()

    def tolist(self) -> Any:
        self.memory.device.synchronize("tolist()")
        return self.content.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})


def new(device: LateDevice, content: Tensor) -> LateTensor:
    """A new tensor of this shape and layout. `content` becomes its memory, and is poisoned."""
    return LateTensor(content, device.allocate(content))


def content_of(value: Any) -> Any:
    return value.content if isinstance(value, LateTensor) else value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The function's results for everything in nested tuples, lists and dictionaries. (torch's tree_map is slower.)"""
    if isinstance(value, tuple | list):
        return type(value)([mapped(function, one) for one in value])
    if isinstance(value, dict):
        return {key: mapped(function, one) for key, one in value.items()}
    return function(value)


def allocations(value: Any) -> list[Allocation]:
    """The memory of all tensors in nested tuples, lists and dictionaries."""
    found: list[Allocation] = []
    mapped(lambda one: found.append(one.memory.allocation) if isinstance(one, LateTensor) else None, value)
    return found


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Queue the operation. Views are made at once."""
    if _is_composite(func):
        return func.decompose(*args, **kwargs)
    tensors: list[Tensor] = []
    mapped(lambda value: tensors.append(value) if isinstance(value, Tensor) else None, (args, kwargs))
    device = next(tensor for tensor in tensors if isinstance(tensor, LateTensor)).memory.device
    name = func._schema.name.removeprefix("aten::")
    if name == "copy_":
        return copy(*args, **kwargs)
    if name == "_to_copy" and kwargs.get("device") is not None:
        return to(args[0], kwargs["device"], kwargs.get("dtype"), bool(kwargs.get("non_blocking")))
    if any(not isinstance(tensor, LateTensor) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but some are on cpu")
    if _waits(name, args):
        device.synchronize(str(func))
        result = _at_once(func, args, kwargs)
        return mapped(lambda one: _filled(device, one), result)
    written, makes_view = _traits(func)
    if written:
        targets = [args[place] if isinstance(place, int) else kwargs[place] for place in written]
        queue(device, func, args, kwargs)
        return targets[0] if len(targets) == 1 else tuple(targets)
    if makes_view:
        memory = tensors[0].memory  # type: ignore[attr-defined]
        with torch.inference_mode(tensors[0].is_inference()):  # as torch demands of views
            return mapped(lambda one: LateTensor(one, memory), _at_once(func, args, kwargs))
    return _computed(device, func, args, kwargs)


def _at_once(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*mapped(content_of, args), **mapped(content_of, kwargs))


def queue(device: LateDevice, func: Callable[..., object], args: Any, kwargs: Any = None) -> None:
    """Queue a call with the memory of these tensors, and with these numbers as they are now."""
    used = allocations((args, kwargs or {}))
    args, kwargs = mapped(content_of, (args, kwargs or {}))
    device.put(lambda: func(*args, **kwargs), used)


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Tensor.copy_()"""
    device = (target if isinstance(target, LateTensor) else source).memory.device  # type: ignore[attr-defined]
    on_device = isinstance(target, LateTensor), isinstance(source, LateTensor)
    if on_device != (True, True):
        host = source if on_device[0] else target
        if not device.is_pinned(host):
            device.refuse_in_capture("a copy of pageable memory")
            if on_device[0] and non_blocking and source.nbytes <= device.staged_bytes:
                source = source.clone()
            else:
                non_blocking = False
        if not non_blocking:
            device.synchronize("a copy between host and device")
    queue(device, Tensor.copy_, (target, source))
    if on_device != (True, True) and not non_blocking:
        device.synchronize()
    return target


def to(source: Tensor, target: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
    """Tensor.to(): a copy if the device or the type differs."""
    dtype = dtype or source.dtype
    on_device = isinstance(source, LateTensor)
    if target is None or (target.type == "cuda") == on_device:
        return source.to(dtype=dtype)
    if on_device:
        device: LateDevice = source.memory.device  # type: ignore[attr-defined]
        device.synchronize("a copy to the host")  # torch makes a new tensor there, and a caller may read it at once
        return source.content.to(dtype=dtype, copy=True)  # type: ignore[attr-defined]
    raise AssertionError("runtime.py copies to the device")


def _computed(device: LateDevice, func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": None}
    shapes = _shapes(func, args, kwargs)
    many = isinstance(shapes, tuple | list)
    results = [
        new(device, torch.empty_strided(one.shape, one.stride(), dtype=one.dtype))
        for one in (shapes if many else [shapes])
    ]
    used = allocations((args, kwargs, results))
    args, kwargs, contents = mapped(content_of, (args, kwargs, results))

    def compute() -> None:
        made = func(*args, **kwargs)
        for content, one in zip(contents, made if many else [made], strict=True):
            content.copy_(one)

    device.put(compute, used)
    return results if isinstance(shapes, list) else tuple(results) if many else results[0]


def _filled(device: LateDevice, value: Any) -> Any:
    """A tensor with this content, at once."""
    if not isinstance(value, Tensor):
        return value
    result = new(device, torch.empty_like(value))
    result.content.copy_(value)
    return result


_known_shapes: dict[Any, Any] = {}


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """The result's shapes and types: tensors on torch's device `meta`. Kept, because torch takes 0.2 ms for them."""
    key = repr((func, mapped(_traits_of, (args, kwargs))))
    if key not in _known_shapes:
        with torch._C.DisableTorchFunction():
            args, kwargs = mapped(_meta, (args, kwargs))
            _known_shapes[key] = func(*args, **kwargs)
    return _known_shapes[key]


def _traits_of(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _waits(name: str, args: Any) -> bool:
    return name in WAITS or (
        name in INDEXES and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    )


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@functools.cache
def _traits(func: Any) -> tuple[Sequence[int | str], bool]:
    """Which arguments it writes, and whether its result is a view of its first argument."""
    written = [
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    return written, not written and any(one.alias_info for one in func._schema.returns)
