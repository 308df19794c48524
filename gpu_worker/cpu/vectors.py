"""Sums of products in compiled kernels, in vector instructions that numba does not know by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from gpu_worker.cpu.numbers import KERNEL_TYPES, write_prefetch

OUTPUTS = 64
LANES = 16  # of a vector register
NUM_PARTS = OUTPUTS // LANES


class _BFloat(ir.Type):
    """LLVM's bfloat16, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
PARTS = ir.LiteralStructType([FLOATS] * NUM_PARTS)


def has_vectors(dtype: torch.dtype) -> bool:
    """Whether this CPU has the instructions of this module for a type, and numba compiles for this CPU."""
    if dtype not in KERNEL_TYPES or config.CPU_NAME or config.CPU_FEATURES or not config.ENABLE_AVX:
        return False
    feature = "avx512f" if dtype == torch.float32 else "avx512bf16"
    return bool(get_host_cpu_features().get(feature))


class _Sums(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{OUTPUTS}")


_sums = _Sums()


@register_model(_Sums)
class _SumsModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, PARTS)


def pointer_at(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    """The address of an element of an array. kind: the type of the array."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def repeat(builder: Any, number: Any, vector: ir.VectorType) -> Any:
    """A vector of this number."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, None))


def load_vector(builder: Any, pointer: Any, index: int, vector: ir.VectorType) -> Any:
    """The vector that begins `index` elements behind a pointer."""
    pointer = builder.gep(pointer, [ir.IntType(64)(index)])
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=2)


def _load_once(builder: Any, pointer: Any, index: int, vector: ir.VectorType) -> Any:
    """As load_vector(), of memory that a step mostly reads once: on Zen 4, the last-level cache does not keep it. The
    address must be a multiple of the vector's size. At any other, the processor stops the program."""
    place = builder.bitcast(builder.gep(pointer, [ir.IntType(64)(index)]), vector.as_pointer())
    numbers = builder.load(place, align=LANES * (2 if vector is _SHORTS else 4))
    numbers.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
    return numbers


def multiply_add(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """sums + weights * numbers, of 16 float32 each."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    multiply = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(multiply, [weights, numbers, sums])


def _add_pairs(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """sums[i] + weights[2 * i] * numbers[2 * i] + weights[2 * i + 1] * numbers[2 * i + 1], of bfloat16 as INTS."""
    kind = ir.FunctionType(FLOATS, [FLOATS, _BFLOATS, _BFLOATS])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(multiply, [sums, builder.bitcast(weights, _BFLOATS), builder.bitcast(numbers, _BFLOATS)])


def _add_products_float32(builder: Any, part: int, sums: Any, weights: Any, numbers: Any) -> Any:
    weights, numbers = (load_vector(builder, pointer, part * LANES, FLOATS) for pointer in (weights, numbers))
    return multiply_add(builder, sums, weights, numbers)


def _add_products_bfloat16(builder: Any, part: int, sums: Any, weights: Any, numbers: Any) -> Any:
    if part >= NUM_PARTS // 2:  # half of the registers hold 64 bfloat16
        return sums
    weights, numbers = (load_vector(builder, pointer, 2 * part * LANES, INTS) for pointer in (weights, numbers))
    return _add_pairs(builder, sums, weights, numbers)


@intrinsic
def add_products(_context: Any, sums: Any, weights: Any, _offset: Any, numbers: Any, _at: Any) -> Any:
    """In a kernel: sums + the products of 64 inputs from numbers[at] on with 64 weights of one output. Their total is
    the total of all sums. Arrays are contiguous. They are float32, or bfloat16 as int16 on a CPU with AVX512_BF16."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights, offset, numbers, at = arguments
        weights = pointer_at(context, builder, signature.args[1], weights, offset)
        numbers = pointer_at(context, builder, signature.args[3], numbers, at)
        add = _add_products_float32 if signature.args[1].dtype == types.float32 else _add_products_bfloat16
        for part in range(NUM_PARTS):
            added = add(builder, part, builder.extract_value(sums, part), weights, numbers)
            sums = builder.insert_value(sums, added, part)
        return sums

    return sums(sums, weights, types.intp, numbers, types.intp), build


@intrinsic
def places_of(_context: Any, rows: Any, _first: Any, _last: Any, _stride: Any, _begin: Any) -> Any:
    """In a kernel: for each k of a tuple `rows`, begin + stride * min(first + k, last)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, first, last, stride, begin = arguments
        places = cgutils.get_null_value(context.get_value_type(signature.return_type))
        for row in range(len(signature.args[0])):
            number = builder.add(first, ir.IntType(64)(row))
            number = builder.select(builder.icmp_signed("<", number, last), number, last)
            places = builder.insert_value(places, builder.add(begin, builder.mul(stride, number)), row)
        return places

    return types.UniTuple(types.intp, len(rows))(rows, *[types.intp] * 4), build


@intrinsic
def add_inputs(_context: Any, rows: Any, weights: Any, _offset: Any, inputs: Any, places: Any, _at: Any) -> Any:
    """In a kernel: for each of a tuple of sums, sums[k] + the products of inputs[places[k] + at] and the input after it
    with their weights for 64 outputs, which begin at weights[offset], packed as in products.py. Arrays are as for
    add_products(), but inputs may be float32 also if the weights are bfloat16.

    This order of instructions needs few registers: the weights of one input (in bfloat16 two), and the sums."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, weights, offset, inputs, places, at = arguments
        weights = pointer_at(context, builder, signature.args[1], weights, offset)
        inputs = pointer_at(context, builder, signature.args[3], inputs, at)
        are_pairs = signature.args[3].dtype != types.float32
        for i in range(1 if are_pairs else 2):
            parts = [_weights_of(builder, signature.args[1], weights, i, part, are_pairs) for part in range(NUM_PARTS)]
            for row in range(len(signature.args[0])):
                place = builder.gep(inputs, [builder.add(builder.extract_value(places, row), ir.IntType(64)(i))])
                if are_pairs:
                    pair = builder.load(builder.bitcast(place, ir.IntType(32).as_pointer()), align=2)
                    number = repeat(builder, pair, INTS)
                else:
                    number = repeat(builder, builder.load(place), FLOATS)
                add = _add_pairs if are_pairs else multiply_add
                for part, weight in enumerate(parts):
                    added = add(builder, builder.extract_value(rows, [row, part]), weight, number)
                    rows = builder.insert_value(rows, added, [row, part])
        return rows

    return rows(rows, weights, types.intp, inputs, places, types.intp), build


def _weights_of(builder: Any, kind: Any, weights: Any, i: int, part: int, are_pairs: bool) -> Any:
    """16 packed weights of input `i`, 0 or 1, as float32; or, as INTS, 16 pairs of bfloat16 of both inputs. kind: the
    type of the array."""
    if kind.dtype == types.float32:
        return load_vector(builder, weights, i * OUTPUTS + part * LANES, FLOATS)
    pairs = load_vector(builder, weights, 2 * part * LANES, INTS)
    if are_pairs:
        return pairs
    # A bfloat16 is the upper half of a float32.
    upper = builder.and_(pairs, ir.Constant(INTS, [-(2**16)] * LANES)) if i else _shifted(builder, pairs)
    return builder.bitcast(upper, FLOATS)


@intrinsic
def widen_weights(_context: Any, packed: Any, _offset: Any, wide: Any, _at: Any) -> Any:
    """In a kernel: wide, float32, from `at` on = the weights of two inputs for 64 outputs, bfloat16, which begin at
    packed[offset]. In `wide` they are packed as float32 is."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, offset, wide, at = arguments
        packed = pointer_at(context, builder, signature.args[0], packed, offset)
        wide = pointer_at(context, builder, signature.args[2], wide, at)
        for i in range(2):
            for part in range(NUM_PARTS):
                numbers = _weights_of(builder, signature.args[0], packed, i, part, are_pairs=False)
                place = builder.gep(wide, [ir.IntType(64)(i * OUTPUTS + part * LANES)])
                builder.store(numbers, builder.bitcast(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(packed, types.intp, wide, types.intp), build


def _shifted(builder: Any, numbers: Any) -> Any:
    """The lower halves of 16 numbers of 32 bits as upper halves."""
    return builder.shl(numbers, ir.Constant(INTS, [16] * LANES))


@intrinsic
def add_outputs(_context: Any, rows: Any, array: Any, places: Any) -> Any:
    """In a kernel: for each of a tuple of sums, sums[k] + the 64 numbers from array[places[k]] on. array: contiguous,
    float32, or bfloat16 as int16."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, array, places = arguments
        for row in range(len(signature.args[0])):
            pointer = pointer_at(context, builder, signature.args[1], array, builder.extract_value(places, row))
            for part in range(NUM_PARTS):
                numbers = _load_floats(builder, signature.args[1], pointer, part)
                rows = builder.insert_value(
                    rows, builder.fadd(builder.extract_value(rows, [row, part]), numbers), [row, part]
                )
        return rows

    return rows(rows, array, places), build


@intrinsic
def store_outputs(_context: Any, array: Any, places: Any, rows: Any) -> Any:
    """In a kernel: for each of a tuple of sums, 64 numbers from array[places[k]] on = sums[k]. array: as of
    add_outputs(). The processor rounds to bfloat16 (ties to even; numbers below 1e-38 become 0)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, places, rows = arguments
        is_float = signature.args[0].dtype == types.float32
        for row in range(len(signature.args[2])):
            pointer = pointer_at(context, builder, signature.args[0], array, builder.extract_value(places, row))
            for part in range(NUM_PARTS):
                numbers = builder.extract_value(rows, [row, part])
                numbers = numbers if is_float else _rounded(builder, numbers)
                place = builder.gep(pointer, [ir.IntType(64)(part * LANES)])
                builder.store(numbers, builder.bitcast(place, numbers.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, places, rows), build


def _rounded(builder: Any, numbers: Any) -> Any:
    """16 float32 as bfloat16."""
    kind = ir.FunctionType(ir.VectorType(_BFloat(), LANES), [FLOATS])
    rounded = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.bitcast(builder.call(rounded, [numbers]), _SHORTS)


def _load_floats(builder: Any, array: Any, pointer: Any, part: int, load: Any = load_vector) -> Any:
    """16 numbers of an array as float32."""
    if array.dtype == types.float32:
        return load(builder, pointer, part * LANES, FLOATS)
    # A bfloat16 is the upper half of a float32.
    bits = builder.zext(load(builder, pointer, part * LANES, _SHORTS), INTS)
    return builder.bitcast(_shifted(builder, bits), FLOATS)


@intrinsic
def zero_sums(_context: Any) -> Any:
    """In a kernel: zeros."""

    def build(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.Constant(PARTS, None)

    return _sums(), build


@intrinsic
def total_of(_context: Any, sums: Any) -> Any:
    """In a kernel: the total of all sums, a float32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        total = builder.extract_value(arguments[0], 0)
        for part in range(1, NUM_PARTS):
            total = builder.fadd(total, builder.extract_value(arguments[0], part))
        # Halves, quarters and so on. Without fastmath, as in products, the compiler keeps this order.
        width = LANES
        while width > 1:
            width //= 2
            order = ir.Constant(INTS, [(i + width) % LANES for i in range(LANES)])
            total = builder.fadd(total, builder.shuffle_vector(total, total, order))
        return builder.extract_element(total, ir.IntType(32)(0))

    return types.float32(sums), build


@intrinsic
def prefetch_64(_context: Any, array: Any, _offset: Any) -> Any:
    """In a kernel: prefetch() for all cache lines of 64 elements."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, kind = pointer_at(context, builder, signature.args[0], *arguments), signature.args[0].dtype
        for element in range(0, OUTPUTS, 64 * 8 // kind.bitwidth):
            write_prefetch(builder, builder.gep(pointer, [ir.IntType(64)(element)]))
        return context.get_dummy_value()

    return types.void(array, types.intp), build


@intrinsic
def add_keys(_context: Any, heads: Any, keys: Any, _places: Any, query: Any, at: Any) -> Any:
    """In a kernel: for each of a tuple of sums, heads[k] + the products of 64 inputs of four keys, from keys[places[j]]
    on, with those from query[at[k]] on. Part j of heads[k] belongs to key j: its total is the total of the part. Arrays
    are as for add_products(). Keys are at multiples of 64 bytes."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        heads, keys, places, query, at = arguments
        pointers = [
            pointer_at(context, builder, signature.args[1], keys, builder.extract_value(places, key))
            for key in range(NUM_PARTS)
        ]
        is_float = signature.args[1].dtype == types.float32
        add, vector, step = (multiply_add, FLOATS, LANES) if is_float else (_add_pairs, INTS, 2 * LANES)
        queries = [
            pointer_at(context, builder, signature.args[3], query, builder.extract_value(at, head))
            for head in range(len(signature.args[0]))
        ]
        for i in range(0, OUTPUTS, step):
            own = [load_vector(builder, pointer, i, vector) for pointer in queries]
            for key, pointer in enumerate(pointers):
                numbers = _load_once(builder, pointer, i, vector)
                for head, inputs in enumerate(own):
                    added = add(builder, builder.extract_value(heads, [head, key]), numbers, inputs)
                    heads = builder.insert_value(heads, added, [head, key])
        return heads

    return heads(heads, keys, _places, query, at), build


@intrinsic
def add_values(_context: Any, heads: Any, values: Any, _place: Any, weights: Any, at: Any) -> Any:
    """In a kernel: for each of a tuple of sums, heads[k] + weights[at[k]] * the 64 values from values[place] on. Arrays
    are contiguous. values: float32, or bfloat16 as int16, at multiples of 64 bytes. weights: float32."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        heads, values, place, weights, at = arguments
        pointer = pointer_at(context, builder, signature.args[1], values, place)
        factors = [
            repeat(builder, builder.load(pointer_at(context, builder, signature.args[3], weights, place)), FLOATS)
            for place in (builder.extract_value(at, head) for head in range(len(signature.args[0])))
        ]
        for part in range(NUM_PARTS):
            numbers = _load_floats(builder, signature.args[1], pointer, part, _load_once)
            for head, factor in enumerate(factors):
                added = multiply_add(builder, builder.extract_value(heads, [head, part]), numbers, factor)
                heads = builder.insert_value(heads, added, [head, part])
        return heads

    return heads(heads, values, types.intp, weights, at), build


@intrinsic
def store_totals(_context: Any, array: Any, _offset: Any, _factor: Any, sums: Any) -> Any:
    """In a kernel: 4 elements of a contiguous float32 array from `offset` on = the totals of the parts of `sums` *
    factor."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, offset, factor, sums = arguments
        a, b, c, d = (_half(builder, builder.extract_value(sums, part)) for part in range(NUM_PARTS))
        # In each half of a register: a0 + a2, b0 + b2, a1 + a3, b1 + b3, then the totals of a, b, c and d.
        ab, cd = (_add_shuffled(builder, *two, (0, 8, 1, 9), (2, 10, 3, 11)) for two in ((a, b), (c, d)))
        fours = _add_shuffled(builder, ab, cd, (0, 1, 8, 9), (2, 3, 10, 11))
        totals = builder.fadd(*(shuffle(builder, fours, fours, range(i, i + 4)) for i in (0, 4)))
        vector = ir.VectorType(ir.FloatType(), 4)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, ir.IntType(32)(0))
        scaled = builder.fmul(totals, shuffle(builder, one, one, [0] * 4))
        pointer = pointer_at(context, builder, signature.args[0], array, offset)
        builder.store(scaled, builder.bitcast(pointer, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32, sums), build


def shuffle(builder: Any, one: Any, other: Any, order: Iterable[int]) -> Any:
    """A vector of elements of two others, by their places."""
    places = list(order)
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))


def _half(builder: Any, numbers: Any) -> Any:
    """8 numbers with the total of 16."""
    return builder.fadd(*(shuffle(builder, numbers, numbers, range(i, i + 8)) for i in (0, 8)))


def _add_shuffled(builder: Any, one: Any, other: Any, low: Sequence[int], high: Sequence[int]) -> Any:
    """The sum of two orders of two vectors of 8. low, high: the places of 4 elements, for each half of the vectors."""
    orders = ([*order, *(place + 4 for place in order)] for order in (low, high))
    return builder.fadd(*(shuffle(builder, one, other, order) for order in orders))


@intrinsic
def load_sums(_context: Any, array: Any, _offset: Any) -> Any:
    """In a kernel: 64 elements of a contiguous float32 array from `offset` on."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_at(context, builder, signature.args[0], *arguments)
        sums = ir.Constant(PARTS, ir.Undefined)
        for part in range(NUM_PARTS):
            sums = builder.insert_value(sums, load_vector(builder, pointer, part * LANES, FLOATS), part)
        return sums

    return _sums(array, types.intp), build


@intrinsic
def add_scaled(_context: Any, sums: Any, values: Any, _offset: Any, _factor: Any) -> Any:
    """In a kernel: sums + factor * the 64 values from values[offset] on. values: contiguous, float32, or bfloat16 as
    int16. factor: a float32."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, values, offset, factor = arguments
        values = pointer_at(context, builder, signature.args[1], values, offset)
        factors = repeat(builder, factor, FLOATS)
        for part in range(NUM_PARTS):
            numbers = _load_floats(builder, signature.args[1], values, part)
            sums = builder.insert_value(
                sums, multiply_add(builder, builder.extract_value(sums, part), numbers, factors), part
            )
        return sums

    return sums(sums, values, types.intp, types.float32), build


@intrinsic
def store_sums(_context: Any, array: Any, _offset: Any, sums: Any) -> Any:
    """In a kernel: 64 elements of a contiguous float32 array from `offset` on = sums."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, offset, sums = arguments
        pointer = pointer_at(context, builder, signature.args[0], array, offset)
        for part in range(NUM_PARTS):
            place = builder.gep(pointer, [ir.IntType(64)(part * LANES)])
            builder.store(builder.extract_value(sums, part), builder.bitcast(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, sums), build
