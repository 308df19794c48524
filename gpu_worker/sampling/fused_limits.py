"""Top-k and top-p for many tokens, in two or three passes over a row's logits.

The first pass counts the tokens in bins of z. The counts give the bin of the k-th largest logit, and limits for where
top-p ends. If the tokens around both limits do not fit into scratch memory, a pass counts again, in two ranges of finer
bins around the limits. The last pass copies the tokens around both limits, draws among the tokens that are kept for
sure, and sums the weights. These sums are exact. So they show whether both limits are among the copies.

A fine bin may contain thousands of equal logits. Both filters keep all of them or none, so they need no copies: the
last pass checks that they are equal, and draws among them.

The limits are not found if a fine bin at a limit has more than CAPACITY / 2 tokens that are not all equal. A bin is
1/252 of the range of z, and a fine bin is usually 1/100 of a bin. The limits may also be missed if top-p ends very near
a run of thousands of equal logits: within about 0.01 % of the row's weight before or after it. Then a row takes more
passes (fused_kernels.py).

Counting passes sum the weights of two bins at most, and otherwise only count, because Triton counts in a
multiprocessor's own memory. Sums of weights by bin would be atomic additions to device memory."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.sampling.fused_values import BINS, NO_TOKEN, clock, kth_largest, tile, wanted_sum, weights_of

# Bins of a range.
_PARTS: tl.constexpr = tl.constexpr(126)
# Bin numbers: the bin between the two ranges, the first bin of the second range, and the bin of everything else.
_BETWEEN: tl.constexpr = tl.constexpr(127)
_SECOND: tl.constexpr = tl.constexpr(128)
_LAST: tl.constexpr = tl.constexpr(255)
# A finer range is wider than the bins that it refines by this part of a bin at each end, because the borders of bins
# are rounded.
_MARGIN: tl.constexpr = tl.constexpr(1 / 64)
# The least width of a range; and where the second range begins if it is not used (no token there has a weight). With
# both, no product overflows.
_NARROW: tl.constexpr = tl.constexpr(1e-20)
_BEYOND: tl.constexpr = tl.constexpr(1e15)


@triton.jit
def coarse_ranges(largest, lowest, temperature, scale):
    """Adjacent ranges of -z that contain every token that can be drawn. Ranges are a tuple: where the first begins, its
    bins per unit, and the same of the second."""
    # A smaller z has no weight, and no clock (gumbel.py) makes its token win.
    depth = tl.minimum(tl.maximum(tl.log(scale) + 1, 26.0), tl.div_rn(largest - lowest, temperature))
    per_unit = tl.div_rn(2.0 * _PARTS, tl.maximum(depth, _NARROW))
    return tl.full((), 0.0, tl.float32), per_unit, tl.div_rn(1.0 * _PARTS, per_unit), per_unit


@triton.jit
def around_bound(bound):
    """Ranges of fine bins from 0 to `bound`. The second has a bin for `bound` itself."""
    first = tl.full((), 0.0, tl.float32)
    return first, tl.div_rn(1.0 * _PARTS, tl.maximum(-bound, _NARROW)), -bound, tl.full((), 1e20, tl.float32)


@triton.jit
def bins_of(z, floor, ranges):
    """The bin of each z: 0 before the first range, then its bins, 127 before the second range, then its bins, and 255
    behind it and for the tokens below `floor`. No multiplication is followed by an addition: a compiler may round
    these once or twice, and then two passes would find different bins."""
    first, per_first, second, per_second = ranges
    in_first = tl.floor(tl.maximum(tl.minimum((-z - first) * per_first, 1.0 * _PARTS), -1.0)).to(tl.int32) + 1
    in_second = tl.maximum(tl.minimum((-z - second) * per_second, 127.0), 0.0).to(tl.int32) + _SECOND
    return tl.where(z >= floor, tl.where(-z < second, in_first, in_second), _LAST)


@triton.jit
def copy_around_limits(
    source, largest, temperature, floor, share, limit, is_limited, first_key, second_key, scale, values, ids, vocab,
    counts, is_counted, ranges, is_fine, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens near the least likely token that top-k keeps and near the one that top-p keeps.

    counts: of the bins of `ranges`, if is_counted. is_fine: these ranges are around the limits.

    Returns (count, floor, wanted, sure, noisy, token):
    - count: the number of copies, more than CAPACITY if the limits are not found. 0: the tokens below are all that are
      kept.
    - floor: the smallest z that top-k and the argument `floor` keep.
    - wanted: the sum that the weights of top-p's tokens must reach.
    - sure, noisy, token: of the tokens that both filters keep for sure, which are not copied, the sum of the weights,
      the best noisy z, and its token."""
    above, between = 0.0, 0.0
    is_chosen, begin, end, middle, kth, equal_middle, equal_kth = False, 0, 0, 0, 0, False, False
    while is_chosen == 0:
        if is_counted == 0:
            counts, above, between = _count(source, largest, temperature, floor, ranges, is_fine, scale, vocab, TILE)
        fits, begin, end, middle, kth, earliest, latest, equal_middle, equal_kth = _choose(
            counts, above, between, ranges, share, limit, is_limited, is_fine, CAPACITY
        )
        is_chosen = fits | is_fine
        if is_chosen == 0:
            ranges = _finer(ranges, earliest, latest, kth)
            is_counted, is_fine = False, True
    whole_end = tl.where(equal_kth, kth + 1, kth)
    sure, whole, noisy, token, count, middle_z, kth_z, are_equal = _copy_bins(
        source, largest, temperature, floor, ranges, begin, end, whole_end, kth, middle, equal_middle, equal_kth,
        first_key, second_key, scale, values, ids, vocab, TILE, CAPACITY,
    )  # fmt: skip
    is_found = are_equal & (count <= CAPACITY)
    wanted = tl.full((), 0.0, tl.float64)
    if is_found:
        places = tl.arange(0, BINS)
        kept = floor
        if equal_kth:
            kept = kth_z
        elif kth < _LAST:
            rank = limit - tl.sum(tl.where(places < kth, counts, 0), 0) + count - _at(places, kth, counts)
            kept = tl.maximum(floor, kth_largest(values, ids, count, 0.0, 1.0, rank, TILE, True))
        around, in_kth = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        for start in range(0, count, TILE):
            z, _tokens = tile(values, ids, start, count, 0.0, 1.0, TILE, True)
            bins, weights = bins_of(z, floor, ranges), tl.where(z >= kept, weights_of(z, scale), 0)
            around += tl.where(bins <= end, weights, 0)
            in_kth += tl.where(bins == kth, weights, 0)
        wanted = wanted_sum(whole + tl.sum(in_kth, 0), share)
        before = sure
        is_reached = (sure + tl.sum(around, 0)).to(tl.float64) >= wanted
        if equal_middle:
            before = sure - _at(places, middle, counts).to(tl.int64) * weights_of(middle_z, scale)
            count = 0
        elif end >= tl.minimum(kth, _LAST - 1):
            is_reached = True
        is_found = (share >= 1) | ((before.to(tl.float64) < wanted) & is_reached)
        floor = tl.where(is_found, kept, floor)
    return tl.where(is_found, count, CAPACITY + 1), floor, wanted, sure, noisy, token


@triton.jit
def _count(source, largest, temperature, floor, ranges, is_fine, scale, vocab, TILE: tl.constexpr):
    """The tokens in each bin; if is_fine, also the weights of bin 0 and of the bin between the ranges."""
    counts = tl.zeros((BINS,), tl.int32)
    above, between = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        z, _tokens = tile(source, start, start, vocab, largest, temperature, TILE, False)
        bins = bins_of(z, floor, ranges)
        counts += tl.histogram(bins, BINS)
        if is_fine:
            weights = weights_of(z, scale)
            above += tl.where(bins == 0, weights, 0)
            between += tl.where(bins == _BETWEEN, weights, 0)
    return counts, tl.sum(above, 0).to(tl.float32) / scale, tl.sum(between, 0).to(tl.float32) / scale


@triton.jit
def _choose(counts, above, between, ranges, share, limit, is_limited, is_fine, CAPACITY: tl.constexpr):
    """Which tokens to copy: those of the bins begin..end and kth.

    Returns whether they fit and contain both limits for sure; begin; end; the bin where top-p seems to end; kth, the
    bin of the k-th largest logit; the first and the last bin where top-p may end; and for the bin of top-p and for kth,
    whether all its tokens must be equal (then they are not copied). In fine ranges the caller ignores whether they
    fit."""
    places = tl.arange(0, BINS)
    counts = tl.where(places < _LAST, counts, 0)
    reached = tl.cumsum(counts, 0)
    before = reached - counts
    # If it is the last bin, top-k keeps every token that can be drawn.
    kth = tl.where(is_limited, tl.minimum(tl.sum((reached < limit).to(tl.int32), 0), _LAST), _LAST)
    num_kth, before_kth = _at(places, kth, counts), _at(places, kth, before)
    equal_kth = is_fine & (num_kth > CAPACITY // 2)
    num_copied = tl.where(equal_kth, 0, num_kth)
    room = CAPACITY - num_copied
    middle, earliest, latest, equal_middle = kth, kth, kth, equal_kth
    begin, end = tl.where(equal_kth, kth + 1, kth), kth
    if share < 1:
        # Estimate the bin where top-p ends, and take tokens on both sides of it.
        masses = counts * tl.exp(-_begin(places + 0.5, ranges))
        if is_fine:
            masses = tl.where(places == 0, above, tl.where(places == _BETWEEN, between, masses))
        sums = tl.cumsum(masses, 0)
        mass_kth = _at(places, kth, masses)
        mass = _at(places, kth, sums) - mass_kth
        part = (limit - before_kth) / tl.maximum(num_kth, 1).to(tl.float32)
        # In a fine bin, logits are often equal. Then top-k keeps all.
        wanted = share * (mass + tl.where(is_fine, 1.0, part) * mass_kth)
        most = tl.minimum(kth, _LAST - 1)
        middle = tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), most)
        # Each mass has a relative error of up to half a bin's width. In the worst case, all masses before top-p's end
        # are too large and all others too small, or the reverse. `wrong` is the relative error of the sum then.
        # `latest` assumes that top-k keeps all of bin kth.
        wrong = 1.1 * (1 - share) / ranges[1]
        earliest = tl.minimum(tl.sum((sums < wanted * (1 - wrong)).to(tl.int32), 0), most)
        latest = tl.minimum(tl.sum((sums < share * (mass + mass_kth) * (1 + wrong)).to(tl.int32), 0), most)
        num_middle, before_middle = _at(places, middle, counts), _at(places, middle, before)
        equal_middle = is_fine & (num_middle > CAPACITY // 2)
        begin, end = middle + 1, middle
        if equal_middle == 0:
            room -= tl.where(middle < kth, num_middle, 0)
            quota = tl.maximum(room, 0) // 2
            begin = tl.sum((before < before_middle - quota).to(tl.int32), 0)
            more = reached - tl.where(places >= kth, num_copied, 0)
            most_copied = before_middle + tl.where(middle < kth, num_middle, 0) + quota
            end = tl.minimum(tl.sum((more <= most_copied).to(tl.int32), 0) - 1, most)
    fits = (room >= 0) & ((share >= 1) | ((begin <= earliest) & (end >= latest)))
    return fits, begin, end, middle, kth, earliest, latest, equal_middle, equal_kth


@triton.jit
def _finer(ranges, earliest, latest, kth):
    """Ranges of finer bins: the first from `earliest` to `latest`, but not into bin kth, which is the second."""
    first = _begin(earliest - _MARGIN, ranges)
    second = tl.where(kth < _LAST, _begin(kth - _MARGIN, ranges), _BEYOND)
    first_width = tl.minimum(_begin(latest + 1 + _MARGIN, ranges), second) - first
    second_width = _begin(kth + 1 + _MARGIN, ranges) - second
    per_first = tl.div_rn(1.0 * _PARTS, tl.maximum(first_width, _NARROW))
    per_second = tl.div_rn(1.0 * _PARTS, tl.maximum(second_width, _NARROW))
    return first, per_first, second, per_second


@triton.jit
def _copy_bins(
    source, largest, temperature, floor, ranges, begin, end, whole_end, kth, middle, equal_middle, equal_kth, first_key,
    second_key, scale, values, ids, vocab, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens of the bins begin..end and kth. Returns the sums of the weights before `begin` and before
    `whole_end`; the best noisy z before `begin` and its token; the number of copies; one z of bin `middle` and one of
    kth, if all tokens of that bin must be equal; and whether they are."""
    sure, whole = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.full((TILE,), NO_TOKEN, tl.int32)
    middle_low, middle_high, kth_low, kth_high = 0.0, float("-inf"), 0.0, float("-inf")
    count = 0
    for start in range(0, vocab, TILE):
        z, tokens = tile(source, ids, start, vocab, largest, temperature, TILE, False)
        bins, weights = bins_of(z, floor, ranges), weights_of(z, scale)
        sure += tl.where(bins < begin, weights, 0)
        whole += tl.where(bins < whole_end, weights, 0)
        noisy = tl.where(bins < begin, z - tl.log(clock(tokens, first_key, second_key)), float("-inf"))
        larger = noisy > best
        best = tl.where(larger, noisy, best)
        best_ids = tl.where(larger, tokens, best_ids)
        taken = ((bins >= begin) & (bins <= end)) | ((bins == kth) & (equal_kth == 0))
        taken = taken & (bins < _LAST)
        spots = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(values + spots, z, mask=taken & (spots < CAPACITY))
        tl.store(ids + spots, tokens, mask=taken & (spots < CAPACITY))
        count += tl.sum(taken.to(tl.int32), 0)
        if equal_middle | equal_kth:
            middle_low = tl.minimum(middle_low, tl.min(tl.where(bins == middle, z, 0.0), 0))
            middle_high = tl.maximum(middle_high, tl.max(tl.where(bins == middle, z, float("-inf")), 0))
            kth_low = tl.minimum(kth_low, tl.min(tl.where(bins == kth, z, 0.0), 0))
            kth_high = tl.maximum(kth_high, tl.max(tl.where(bins == kth, z, float("-inf")), 0))
    tl.debug_barrier()
    noisy = tl.max(best, 0)
    token = tl.min(tl.where(best == noisy, best_ids, NO_TOKEN), 0)
    are_equal = ((equal_middle == 0) | (middle_low == middle_high)) & ((equal_kth == 0) | (kth_low == kth_high))
    return tl.sum(sure, 0), tl.sum(whole, 0), noisy, token, count, middle_low, kth_low, are_equal


@triton.jit
def _begin(place, ranges):
    """-z where a bin begins."""
    first, per_first, second, per_second = ranges
    return tl.where(place < 127.5, first + (place - 1) / per_first, second + (place - _SECOND) / per_second)


@triton.jit
def _at(places, place, values):
    """The value at a place."""
    return tl.sum(tl.where(places == place, values, 0), 0)
