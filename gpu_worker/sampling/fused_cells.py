"""Top-k's and top-p's exact limits, from the weights and counts of thousands of cells in device memory. This is only
for the few rows that have too many tokens around a limit to copy them.

The atomic operations add whole numbers, or find a maximum or minimum. So their order does not matter."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.sampling.fused_values import NO_KEY, at, clock, keys_of, tile, wanted_sum, weights_of

_NOTHING: tl.constexpr = tl.constexpr(-(2**63))
_MOST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def divide(
    source, scratch, largest, temperature, floor, share, limit, begin, end, kth_begin, kth_end, first_key, second_key,
    scale, per_unit, vocab, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Divide two ranges of keys into cells, begin..end and kth_begin..kth_end (the ends excluded; the second range
    begins at the first one's end or later), and find the cells of both limits. The key of the k-th largest logit is in
    one of the ranges; if kth_begin is NO_KEY, top-k keeps all tokens.

    Returns (fits, is_drawn, token, begin, end, kth_begin, kth_end): whether the tokens of the limits' cells fit into
    the copies; whether both limits are known, and the drawn token then; and the cells. They are ranges as in the
    arguments: that of top-p's limit, and that of the k-th largest logit. The first may be several cells, because
    top-p's limit depends on which tokens top-k keeps; and it has no keys if top-p's limit is in the second."""
    CELLS: tl.constexpr = CAPACITY // 2
    # The first cell is before both ranges, one is between them, and the last is of everything else.
    MOST: tl.constexpr = CELLS - 4
    width = tl.cdiv(end - begin, tl.where(kth_begin < kth_end, MOST // 2, MOST))
    kth_width = tl.cdiv(kth_end - kth_begin, tl.where(begin < end, MOST // 2, MOST))
    width, kth_width = tl.maximum(width, 1), tl.maximum(kth_width, 1)
    between = tl.cdiv(end - begin, width) + 1
    weights, best, counts, low, high = _cells(
        source, scratch, largest, temperature, floor, begin, end, kth_begin, kth_end, width, kth_width, between,
        first_key, second_key, scale, per_unit, vocab, TILE, CELLS,
    )  # fmt: skip
    places = tl.arange(0, CELLS)
    is_equal = low == high
    reached, sums = tl.cumsum(counts, 0), tl.cumsum(weights, 0)
    is_limited = kth_begin < NO_KEY
    kth = CELLS - 1
    if is_limited:
        kth = tl.minimum(tl.sum((reached < limit).to(tl.int32), 0), CELLS - 1)
    # Top-k keeps all tokens of cell kth if they are equal, otherwise some.
    most = at(places, kth, sums)
    is_exact = (kth == CELLS - 1) | (at(places, kth, is_equal.to(tl.int32)) > 0)
    least = tl.where(is_exact, most, most - at(places, kth, weights))
    first, last = kth, kth
    if share < 1:
        first = tl.minimum(tl.sum((sums.to(tl.float64) < wanted_sum(least, share)).to(tl.int32), 0), kth)
        last = tl.minimum(tl.sum((sums.to(tl.float64) < wanted_sum(most, share)).to(tl.int32), 0), kth)
    is_exact = is_exact & (first == last) & ((last == CELLS - 1) | (at(places, last, is_equal.to(tl.int32)) > 0))
    winner = tl.max(tl.where(places <= last, best, _NOTHING), 0)
    token = (winner & _MOST).to(tl.int32) ^ _MOST
    num_copied = at(places, last, reached) - at(places, first, reached - counts)
    num_copied += tl.where(last < kth, at(places, kth, counts), 0)
    new_kth = _begin(kth, begin, end, kth_begin, kth_end, width, kth_width, between)
    new_kth_end = _begin(kth + 1, begin, end, kth_begin, kth_end, width, kth_width, between)
    new_kth = tl.where(kth < CELLS - 1, new_kth, NO_KEY)
    new_kth_end = tl.where(kth < CELLS - 1, new_kth_end, NO_KEY)
    new_begin = tl.minimum(_begin(first, begin, end, kth_begin, kth_end, width, kth_width, between), new_kth)
    new_end = tl.minimum(_begin(last + 1, begin, end, kth_begin, kth_end, width, kth_width, between), new_kth)
    return (num_copied <= CAPACITY) & (is_exact == 0), is_exact, token, new_begin, new_end, new_kth, new_kth_end


@triton.jit
def _cells(
    source, scratch, largest, temperature, floor, begin, end, kth_begin, kth_end, width, kth_width, between, first_key,
    second_key, scale, per_unit, vocab, TILE: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Of each cell: the sum of the weights, the best noisy z with its token (_ranked()), the number of tokens, and the
    bits of the largest z and of the smallest. These bits differ in the first cell and in the one between the ranges,
    which are summed without atomic additions, because most tokens may be there."""
    weights_at, best_at = scratch, scratch + CELLS
    counts_at = (scratch + 2 * CELLS).to(tl.pointer_type(tl.int32), bitcast=True)
    low_at, high_at = counts_at + CELLS, counts_at + 2 * CELLS
    places = tl.arange(0, CELLS)
    tl.store(weights_at + places, tl.zeros((CELLS,), tl.int64))
    tl.store(best_at + places, tl.full((CELLS,), _NOTHING, tl.int64))
    tl.store(counts_at + places, tl.zeros((CELLS,), tl.int32))
    tl.store(low_at + places, tl.full((CELLS,), _MOST, tl.int32))
    tl.store(high_at + places, tl.full((CELLS,), -1, tl.int32))
    tl.debug_barrier()
    weight_before, weight_between = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    best_before, best_between = tl.full((), _NOTHING, tl.int64), tl.full((), _NOTHING, tl.int64)
    num_before, num_between = 0, 0
    for start in range(0, vocab, TILE):
        z, tokens = tile(source, start, start, vocab, largest, temperature, TILE, False)
        keys = keys_of(z, floor, per_unit)
        in_first = tl.where(keys < begin, 0, tl.where(keys < end, 1 + (keys - begin) // width, between))
        in_second = tl.where(keys < kth_end, between + 1 + (keys - kth_begin) // kth_width, CELLS - 1)
        cells = tl.where(keys < kth_begin, in_first, in_second)
        weights, bits = weights_of(z, scale), tl.abs(z).to(tl.int32, bitcast=True)
        noisy = _ranked(z - tl.log(clock(tokens, first_key, second_key)), tokens)
        inside = (cells > 0) & (cells != between) & (cells < CELLS - 1)
        tl.atomic_add(weights_at + cells, weights, mask=inside, sem="relaxed")
        tl.atomic_max(best_at + cells, noisy, mask=inside, sem="relaxed")
        tl.atomic_add(counts_at + cells, 1, mask=inside, sem="relaxed")
        tl.atomic_min(low_at + cells, bits, mask=inside, sem="relaxed")
        tl.atomic_max(high_at + cells, bits, mask=inside, sem="relaxed")
        weight_before += tl.sum(tl.where(cells == 0, weights, 0), 0)
        weight_between += tl.sum(tl.where(cells == between, weights, 0), 0)
        best_before = tl.maximum(best_before, tl.max(tl.where(cells == 0, noisy, _NOTHING), 0))
        best_between = tl.maximum(best_between, tl.max(tl.where(cells == between, noisy, _NOTHING), 0))
        num_before += tl.sum((cells == 0).to(tl.int32), 0)
        num_between += tl.sum((cells == between).to(tl.int32), 0)
    tl.debug_barrier()
    weights = tl.load(weights_at + places) + _two(places, weight_before, between, weight_between)
    counts = tl.load(counts_at + places) + _two(places, num_before, between, num_between)
    best = tl.load(best_at + places)
    best = tl.where(places == 0, best_before, tl.where(places == between, best_between, best))
    low, high = tl.load(low_at + places), tl.load(high_at + places)
    tl.debug_barrier()
    return weights, best, counts, low, high


@triton.jit
def _two(places, first, place, second):
    """`first` at place 0, `second` at `place`, and 0 elsewhere."""
    return tl.where(places == 0, first, tl.where(places == place, second, 0))


@triton.jit
def _ranked(noisy, tokens):
    """Whole numbers in the order of `noisy`; among equals, larger for the lower token."""
    bits = (noisy + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & _MOST)).to(tl.int64) << 32) | (tokens ^ _MOST).to(tl.int64)


@triton.jit
def _begin(place, begin, end, kth_begin, kth_end, width, kth_width, between):
    """The first key of a cell."""
    in_first = tl.where(place > 0, begin + tl.minimum((place - 1) * width, end - begin), 0)
    in_second = kth_begin + tl.minimum((place - between - 1) * kth_width, kth_end - kth_begin)
    return tl.where(place <= between, in_first, in_second)
