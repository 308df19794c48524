"""Numbers of compiled kernels: bfloat16, which numba does not know, and a fast exponential.

A bfloat16 tensor is passed as int16: its bits are the upper half of the float32 with the same value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

# Sums may be reordered, so that they use vector instructions. NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
_BYTES = ir.IntType(8).as_pointer()
# The types that kernels know, and how numba sees them.
KERNEL_TYPES = {torch.float32: types.float32, torch.bfloat16: types.int16}
INFINITY = np.int32(0x7F800000)  # its bits
# CPUs that multiply pairs of bfloat16 half as fast as they multiply the same numbers as float32, by LLVM's names: 97
# instead of 182 GFLOP/s on a core of the second. The first has the same cores. (Zen 4: twice as fast.)
_SLOW_PAIRS = {"sapphirerapids", "emeraldrapids"}


def as_array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory for a kernel: float32, or bfloat16 as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic
def float_of_bits(_context: Any, _bits: Any) -> Any:
    """In a kernel: the float32 with these bits, a uint32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def bits_of_float(_context: Any, _value: Any) -> Any:
    """In a kernel: the bits of a float32, as uint32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def prefetch(_context: Any, array: Any, _offset: Any) -> Any:
    """In a kernel: fetch the cache line of a contiguous array's element `offset` into the second-level cache. Any
    offset is allowed. The first-level cache would be slower: a core waits for only a few of its lines at a time."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        write_prefetch(builder, builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), build


def write_prefetch(builder: Any, address: Any) -> None:
    """Write the instruction that fetches the cache line of an address."""
    flag = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, flag, flag, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # A read, into the second-level cache, of data.
    builder.call(function, [builder.bitcast(address, _BYTES), flag(0), flag(2), flag(1)])


def load(number: Any) -> Any:
    """In a kernel: the float32 value of an array's element."""
    raise NotImplementedError


def store(array: Any, index: Any, value: Any) -> None:
    """In a kernel: array[index] = value, a float32, rounded to the array's type (ties to even)."""
    raise NotImplementedError


def new_factors(shape: Any, like: Any) -> Any:
    """In a kernel: an empty array for rows of the type of `like`, in the type in which this CPU multiplies them."""
    raise NotImplementedError


@overload(load, inline="always")
def _load(number: Any) -> Any:
    if number != types.int16:

        def load_float(number: Any) -> Any:
            return number

        return load_float

    def load_bfloat(number: Any) -> Any:
        return float_of_bits(np.uint32(np.uint16(number)) << np.uint32(16))

    return load_bfloat


@overload(store, inline="always")
def _store(array: Any, index: Any, value: Any) -> Any:
    if array.dtype != types.int16:

        def store_float(array: Any, index: Any, value: Any) -> None:
            array[index] = value

        return store_float

    def store_bfloat(array: Any, index: Any, value: Any) -> None:
        bits = bits_of_float(value)
        if value != value:  # NaN: rounding could make it infinity
            array[index] = np.int16(0x7FC0)
        else:
            rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            array[index] = np.int16(np.uint16(rounded >> np.uint32(16)))

    return store_bfloat


def takes_floats(rows: Any) -> bool:
    """Whether this CPU multiplies rows of this type of array faster as float32 than as they are."""
    return bool(rows.dtype == types.int16) and get_host_cpu_name() in _SLOW_PAIRS


@overload(new_factors, inline="always")
def _new_factors(shape: Any, like: Any) -> Any:
    def of_same_type(shape: Any, like: Any) -> Any:
        return np.empty(shape, like.dtype)

    def of_floats(shape: Any, like: Any) -> Any:
        return np.empty(shape, np.float32)

    return of_floats if takes_floats(like) else of_same_type


@njit(inline="always")
def order_of(number: Any) -> Any:
    """An int32 for a float32, in the order of the numbers: -0 is 0, and NaN is more than infinity."""
    bits = np.int32(bits_of_float(number))
    size = bits & np.int32(0x7FFFFFFF)
    return np.int32(-size) if bits < 0 and size <= INFINITY else size


@njit(inline="always")
def number_of(order: Any) -> Any:
    """The float32 of order_of()."""
    size = float_of_bits(np.uint32(abs(order)))
    return -size if order < 0 else size


@njit
def largest(numbers: Any) -> Any:
    """The largest number of a float32 array without NaN. Compares the bits as integers, because comparisons of floats
    that mind NaN do not use vector instructions."""
    bits = numbers.view(np.int32)
    most = np.int32(-(2**31))
    for i in range(len(bits)):
        # Negative floats compare in reverse.
        order = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        most = max(most, order)
    return float_of_bits(np.uint32(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit(inline="always")
def scale_of(numbers: Any) -> Any:
    """What parts_of() divides the numbers of a row by: their largest absolute value / 127, as a float32, or NaN if one
    is infinite or NaN."""
    # By its bits: comparing them as integers is vectorized, even if some are NaN.
    most = np.int32(0)
    for i in range(len(numbers)):
        most = max(most, np.int32(bits_of_float(load(numbers[i])) & np.uint32(0x7FFFFFFF)))
    if most >= np.int32(0x7F800000):
        return np.float32(np.nan)
    return max(float_of_bits(np.uint32(most)), np.float32(1e-30)) / np.float32(127)


@njit(inline="always")
def parts_of(number: Any) -> Any:
    """A float32 of at most 127 as high + low / 254, whole numbers of at most 127. The error is at most 1 / 508."""
    high = np.floor(number + np.float32(0.5))
    return high, np.floor((number - high) * np.float32(254) + np.float32(0.5))


@njit(inline="always", fastmath=FASTMATH)
def exp(x: Any) -> Any:
    """The exponential of a float32, to about 1e-7 (Cephes' expf). An x outside -87..88 counts as the nearer limit. A
    call of the C library in a loop would keep the loop from using vector instructions."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x  # these comparisons let NaN pass
    x = np.float32(88.0) if x > np.float32(88.0) else x
    turns = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - turns * np.float32(0.693359375) + turns * np.float32(2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1.0)
    return power * float_of_bits(np.uint32((np.int32(turns) + np.int32(127)) << np.int32(23)))


# With numpy's own operations on arrays, numba would also compile what writes their error messages: dozens of functions.
@njit(inline="always")
def fill(array: Any, number: Any) -> None:
    """array[:] = number, for one dimension."""
    for i in range(len(array)):
        array[i] = number


@njit(inline="always", fastmath=FASTMATH)
def divide(array: Any, number: Any) -> None:
    """array /= number, for one dimension."""
    for i in range(len(array)):
        array[i] /= number


@njit(inline="always", fastmath=FASTMATH)
def softmax(scores: Any, scale: Any) -> Any:
    """The softmax of scores * scale, float32, in place, but for the division by the sum, which it returns. NaN stays
    NaN."""
    most, total = largest(scores), np.float32(0)
    for t in range(len(scores)):
        weight = exp((scores[t] - most) * scale)
        scores[t] = weight
        total += weight
    return total
