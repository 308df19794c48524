"""Vectors of 64 float32 in compiled kernels. The compiler splits them into the processor's vector registers.

numba has no vectors, and its compiler finds them only in simple loops.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

LANES = 64
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


@intrinsic
def zeros(_context: Any) -> Any:
    """In a kernel: a vector of zeros."""

    def build(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.Constant(_FLOATS, None)

    return _vector(), build


@intrinsic
def add_scaled(_context: Any, total: Any, vector: Any, factor: Any) -> Any:
    """In a kernel: total + vector * factor (a float32), rounded once."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        total, vector, factor = arguments
        first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), factor, ir.IntType(32)(0))
        factors = builder.shuffle_vector(first, first, ir.Constant(_INTS, None))
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        multiply = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(multiply, [vector, factors, total])

    return _vector(_vector, _vector, types.float32), build


def _weights_of(second: bool) -> Any:
    @intrinsic
    def weights_of(_context: Any, packed: Any, _offset: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            pointer = builder.gep(data, [arguments[1]])
            if signature.args[0].dtype == types.float32:
                pointer = builder.gep(pointer, [ir.IntType(64)(LANES * second)])
                return builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
            # 32 bits are the bfloat16 weights of both inputs. A bfloat16 is the upper half of a float32.
            pairs = builder.load(builder.bitcast(pointer, _INTS.as_pointer()), align=2)
            if second:
                bits = builder.and_(pairs, ir.Constant(_INTS, [0xFFFF0000] * LANES))
            else:
                bits = builder.shl(pairs, ir.Constant(_INTS, [16] * LANES))
            return builder.bitcast(bits, _FLOATS)

        return _vector(packed, types.intp), build

    return weights_of


# In a kernel: the weights of the first or the second of two inputs, for 64 outputs. packed: a matrix as in few_rows.py,
# float32, or bfloat16 as int16. offset: where the weights of the two inputs begin.
first_weights, second_weights = _weights_of(False), _weights_of(True)


@intrinsic
def store_vector(_context: Any, array: Any, vector: Any) -> Any:
    """In a kernel: the first 64 elements of a contiguous float32 array = vector."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store(arguments[1], builder.bitcast(data, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, vector), build
