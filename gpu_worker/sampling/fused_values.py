"""What all sampling kernels compute of a row's logits: z, weights, clocks, the k-th largest z."""

from __future__ import annotations

import triton
import triton.language as tl

NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
# Bins of a histogram, and number of values that a digit has in kth_largest().
BINS: tl.constexpr = tl.constexpr(256)
# Keys are whole numbers. The first bits of a key are its bin: one of 252, or of three more for tokens without weight.
BIN_BITS: tl.constexpr = tl.constexpr(22)
BINS_USED: tl.constexpr = tl.constexpr(255)
# The key of the tokens that are not drawn.
NO_KEY: tl.constexpr = tl.constexpr(255 << 22)
_KEYS: tl.constexpr = tl.constexpr(252.0 * 2**22)
# The least range of z. With it, no product overflows.
_NARROW: tl.constexpr = tl.constexpr(1e-20)
_NO_WEIGHT: tl.constexpr = tl.constexpr(-60.0)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# ln 2 in two parts. The first has few bits, so that its product with a whole number is exact.
_LN2_HIGH: tl.constexpr = tl.constexpr(0.693359375)
_LN2_LOW: tl.constexpr = tl.constexpr(-2.12194440e-4)
_BELOW_ONE: tl.constexpr = tl.constexpr(1 - 2.0**-24)


@triton.jit
def tile(source, ids, start, count, largest, temperature, TILE: tl.constexpr, COPIED: tl.constexpr):
    """z and token of TILE values, -inf behind the last. COPIED: the source is scratch memory, which contains z."""
    lanes = start + tl.arange(0, TILE)
    inside = lanes < count
    x = tl.load(source + lanes, mask=inside, other=float("-inf")).to(tl.float32)
    if COPIED:
        return x, tl.load(ids + lanes, mask=inside, other=0)
    else:  # noqa: RET505  (one of the two is compiled)
        return tl.div_rn(x - largest, temperature), lanes


@triton.jit
def copies_of(scratch, CAPACITY: tl.constexpr):
    """Where z and token of the copies are, in a row's scratch memory."""
    values = scratch.to(tl.pointer_type(tl.float32), bitcast=True)
    return values, (scratch + CAPACITY // 2).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def keys_per_unit(largest, lowest, temperature, scale):
    """How many keys a distance of 1 between two z has. The keys reach every token that can be drawn: a smaller z has
    no weight, and no clock (gumbel.py) makes its token win."""
    depth = tl.minimum(tl.maximum(tl.log(scale) + 1, 26.0), tl.div_rn(largest - lowest, temperature))
    return tl.div_rn(_KEYS, tl.maximum(depth, _NARROW))


@triton.jit
def keys_of(z, floor, per_unit):
    """A whole number for each z, larger for a smaller z. z that are almost equal may have the same key."""
    keys = tl.minimum(-z * per_unit, 1.0 * NO_KEY).to(tl.int32)
    return tl.where(z >= floor, keys, NO_KEY)


@triton.jit
def at(places, place, values):
    """The value at a place."""
    return tl.sum(tl.where(places == place, values, 0), 0)


@triton.jit
def weights_of(z, scale):
    """whole_weights() in filters.py."""
    return tl.floor(_exp(tl.where(z > _NO_WEIGHT, z, _NO_WEIGHT)) * scale + 0.5).to(tl.int64)  # NaN has no weight


@triton.jit
def _exp(x):
    """exp() with an error of a few units in the last place; that of the hardware grows with the size of x."""
    whole = tl.floor(x * _LOG2_E + 0.5)
    return tl.exp2(whole) * tl.exp(x - whole * _LN2_HIGH - whole * _LN2_LOW)


@triton.jit
def clock(tokens, first_key, second_key):
    """clocks() in gumbel.py."""
    bits = (tokens.to(tl.uint32) * 0x9E3779B1) ^ first_key
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = ((bits ^ (bits >> 15)) + second_key) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    uniform = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31), _BELOW_ONE)
    # -log1p(-uniform): the rounding error of `rest` is in the divisor, too, and cancels.
    rest = 1.0 - uniform
    return tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, tl.where(rest == 1.0, 1.0, 1.0 - rest)))


@triton.jit
def wanted_sum(total, share):
    """The sum that the weights of top-p's tokens must reach."""
    return tl.maximum(total.to(tl.float64) * share.to(tl.float64), 1.0)


@triton.jit
def kth_largest(source, ids, count, largest, temperature, k, TILE: tl.constexpr, COPIED: tl.constexpr):
    """The k-th largest z, digit by digit: as z is at most 0, the bits of -z are whole numbers in the opposite order."""
    places = tl.arange(0, BINS)
    found, left = tl.full((), 0, tl.int32), k
    for digit in range(0, 4):
        shift = 24 - 8 * digit
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, count, TILE):
            z, _tokens = tile(source, ids, start, count, largest, temperature, TILE, COPIED)
            bits = tl.abs(z).to(tl.int32, bitcast=True) >> shift
            taken = (start + tl.arange(0, TILE) < count) & (bits >> 8 == found)
            counts += tl.histogram(bits & 0xFF, BINS, taken)
        reached = tl.cumsum(counts, 0)
        next_digit = tl.sum((reached < left).to(tl.int32), 0)
        left -= tl.sum(tl.where(places < next_digit, counts, 0), 0)
        found = found * 256 + next_digit
    return -found.to(tl.float32, bitcast=True)
