"""Sums of products of int8 in compiled kernels, in vector instructions that numba does not know by itself."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu_worker.cpu.vectors import (
    FLOATS,
    INTS,
    LANES,
    NUM_PARTS,
    PARTS,
    load_vector,
    multiply_add,
    pointer_at,
    repeat,
    shuffle,
)


def has_byte_products() -> bool:
    """Whether this CPU has the instruction of add_bytes(). What has_vectors() checks is checked already."""
    return bool(get_host_cpu_features().get("avx512vnni"))


@intrinsic
def add_bytes(_context: Any, rows: Any, codes: Any, _offset: Any, inputs: Any, places: Any, _at: Any) -> Any:
    """In a kernel: for each of a tuple of sums, sums[k] + the products of four inputs, int8, from inputs[places[k] +
    at] on, with their codes for 64 outputs, uint8, which begin at codes[offset]: first the four of an output. Arrays
    are contiguous; codes are at multiples of 64. The sums are int32, for join_bytes() and largest_of_bytes(). Without
    has_byte_products(), a call stops the program."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, codes, offset, inputs, places, at = arguments
        if not has_byte_products():
            trap = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, trap, "llvm.trap"), [])
            return rows
        codes = builder.bitcast(pointer_at(context, builder, signature.args[1], codes, offset), INTS.as_pointer())
        inputs = pointer_at(context, builder, signature.args[3], inputs, at)
        kind = ir.FunctionType(INTS, [INTS] * 3)
        add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        parts = [builder.load(builder.gep(codes, [ir.IntType(64)(part)]), align=64) for part in range(NUM_PARTS)]
        for row in range(len(signature.args[0])):
            place = builder.gep(inputs, [builder.extract_value(places, row)])
            number = builder.load(builder.bitcast(place, ir.IntType(32).as_pointer()), align=1)
            four = repeat(builder, number, INTS)
            for part, own in enumerate(parts):
                total = builder.bitcast(builder.extract_value(rows, [row, part]), INTS)
                total = builder.bitcast(builder.call(add, [total, own, four]), FLOATS)
                rows = builder.insert_value(rows, total, [row, part])
        return rows

    return rows(rows, codes, types.intp, inputs, places, types.intp), build


@intrinsic
def join_bytes(_context: Any, high: Any, low: Any, _high_zero: Any, _low_zero: Any, _factor: Any) -> Any:
    """In a kernel: (high - high_zero) + (low - low_zero) * factor, of sums from add_bytes(). Zeros are int32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        factor = repeat(builder, arguments[4], FLOATS)
        joined = ir.Constant(PARTS, ir.Undefined)
        for part in range(NUM_PARTS):
            upper, lower = (
                _difference(builder, builder.extract_value(sums, part), zero)
                for sums, zero in zip(arguments[:2], arguments[2:4], strict=True)
            )
            joined = builder.insert_value(joined, multiply_add(builder, upper, lower, factor), part)
        return joined

    return high(high, low, types.int32, types.int32, types.float32), build


def _difference(builder: Any, total: Any, zero: Any) -> Any:
    """16 int32 in a register for float32, less an int32, as float32."""
    return builder.sitofp(builder.sub(builder.bitcast(total, INTS), repeat(builder, zero, INTS)), FLOATS)


@intrinsic
def largest_of_bytes(_context: Any, rows: Any, zeros: Any, places: Any, scales: Any, _offset: Any) -> Any:
    """In a kernel: for each of a tuple of sums from add_bytes(), the largest of (sums[k] - zeros[places[k]]) * the 64
    scales from scales[offset] on. Arrays are contiguous. zeros: int32. scales: float32, without NaN."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, zeros, places, scales, offset = arguments
        pointer = pointer_at(context, builder, signature.args[3], scales, offset)
        factors = [load_vector(builder, pointer, part * LANES, FLOATS) for part in range(NUM_PARTS)]
        largest = cgutils.get_null_value(context.get_value_type(signature.return_type))
        for row in range(len(signature.args[0])):
            place = builder.extract_value(places, row)
            zero = builder.load(pointer_at(context, builder, signature.args[1], zeros, place))
            most = None
            for part, factor in enumerate(factors):
                own = builder.fmul(_difference(builder, builder.extract_value(rows, [row, part]), zero), factor)
                most = own if most is None else _larger(builder, most, own)
            width = LANES
            while width > 1:
                width //= 2
                order = [(i + width) % LANES for i in range(LANES)]
                most = _larger(builder, most, shuffle(builder, most, most, order))
            largest = builder.insert_value(largest, builder.extract_element(most, ir.IntType(32)(0)), row)
        return largest

    return types.UniTuple(types.float32, len(rows))(rows, zeros, places, scales, types.intp), build


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)
