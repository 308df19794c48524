"""Sums of products with 64 outputs in compiled kernels, in vector instructions that numba does not know by itself."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

OUTPUTS = 64
_LANES = 16  # of a vector register
_NUM_PARTS = OUTPUTS // _LANES


class _BFloat(ir.Type):
    """LLVM's bfloat16, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_INTS = ir.VectorType(ir.IntType(32), _LANES)
_BFLOATS = ir.VectorType(_BFloat(), 2 * _LANES)
_PARTS = ir.LiteralStructType([_FLOATS] * _NUM_PARTS)


class _Sums(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{OUTPUTS}")


_sums = _Sums()


@register_model(_Sums)
class _SumsModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _PARTS)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _repeat(builder: Any, number: Any, vector: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, None))


def _add_float32(builder: Any, part: int, sums: Any, packed: Any, inputs: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    multiply = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")
    for i in range(2):
        weights = builder.gep(packed, [ir.IntType(64)(i * OUTPUTS + part * _LANES)])
        weights = builder.load(builder.bitcast(weights, _FLOATS.as_pointer()), align=4)
        number = builder.load(builder.gep(inputs, [ir.IntType(64)(i)]))
        sums = builder.call(multiply, [weights, _repeat(builder, number, _FLOATS), sums])
    return sums


def _add_bfloat16(builder: Any, part: int, sums: Any, packed: Any, inputs: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _BFLOATS, _BFLOATS])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    weights = builder.gep(packed, [ir.IntType(64)(2 * part * _LANES)])
    weights = builder.load(builder.bitcast(weights, _INTS.as_pointer()), align=2)
    pair = builder.load(builder.bitcast(inputs, ir.IntType(32).as_pointer()), align=2)
    pairs = _repeat(builder, pair, _INTS)
    return builder.call(multiply, [sums, builder.bitcast(weights, _BFLOATS), builder.bitcast(pairs, _BFLOATS)])


@intrinsic
def zero_sums(_context: Any) -> Any:
    """In a kernel: zeros."""

    def build(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.Constant(_PARTS, None)

    return _sums(), build


@intrinsic
def add_inputs(_context: Any, sums: Any, packed: Any, _offset: Any, inputs: Any, _at: Any) -> Any:
    """In a kernel: sums + the products of inputs[at] and inputs[at + 1] with their weights for 64 outputs, which begin
    at packed[offset] (few_rows.py). Arrays are contiguous, float32 or bfloat16 as int16. bfloat16 needs a CPU with
    AVX512_BF16."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, packed, offset, inputs, at = arguments
        packed = _pointer(context, builder, signature.args[1], packed, offset)
        inputs = _pointer(context, builder, signature.args[3], inputs, at)
        add = _add_float32 if signature.args[1].dtype == types.float32 else _add_bfloat16
        for part in range(_NUM_PARTS):
            added = add(builder, part, builder.extract_value(sums, part), packed, inputs)
            sums = builder.insert_value(sums, added, part)
        return sums

    return sums(sums, packed, types.intp, inputs, types.intp), build


@intrinsic
def store_sums(_context: Any, array: Any, sums: Any) -> Any:
    """In a kernel: the first 64 elements of a contiguous float32 array = sums."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, sums = arguments
        for part in range(_NUM_PARTS):
            pointer = _pointer(context, builder, signature.args[0], array, ir.IntType(64)(part * _LANES))
            builder.store(builder.extract_value(sums, part), builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, sums), build
