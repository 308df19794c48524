"""Top-k and top-p for many tokens, in two or three passes over a row's logits.

Each z has a key (fused_values.py): a whole number up to 2**30, larger for smaller z. A pass counts the tokens in 252
bins of keys. The counts give the bin of the k-th largest logit, and limits for where top-p ends. If the tokens around
both limits fit into scratch memory, the next pass copies them, draws among the tokens that are kept for sure, and sums
the weights. These sums are exact. So they show whether both limits are among the copies.

If these tokens do not fit, another pass counts them again, in thousands of smaller cells (fused_cells.py). It also sums
their weights, so the cells of both limits are exact. If each of the two cells has only equal logits, this pass has
drawn the token, too. Otherwise the next pass copies the tokens of these cells. If they do not fit, it divides the cells
into cells of a few keys instead.

So a row takes at most four passes. It takes more only if (1) more than CAPACITY tokens are in a part of about 2**-18 of
the row's range of z at the limits, and (2) different logits are in a part of about 2**-28 of the range at a limit. The
range is at most 31. With both filters, (1) and different logits at top-k's limit can suffice, because top-p's limit
depends on the weight that top-k keeps. Such a row takes a pass or two more. If more than CAPACITY tokens have the very
keys of the limits, and are not all equal, the limits are not found. Then the row takes up to 10 passes, and one more
for each rejected draw (fused_kernels.py).

The pass over 252 bins sums no weights, because Triton counts in a multiprocessor's own memory. Sums of weights by bin
are atomic additions to device memory."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.sampling.fused_cells import divide
from gpu_worker.sampling.fused_values import (
    BIN_BITS,
    BINS,
    BINS_USED,
    NO_KEY,
    NO_TOKEN,
    at,
    clock,
    copies_of,
    keys_of,
    kth_largest,
    tile,
    wanted_sum,
    weights_of,
)

_LAST: tl.constexpr = tl.constexpr(BINS_USED)
# Three rounds divide 2**30 keys into cells of one key.
_MOST_ROUNDS: tl.constexpr = tl.constexpr(4)


@triton.jit
def copy_around_limits(
    source, scratch, largest, temperature, floor, share, limit, is_limited, bound, first_key, second_key, scale,
    per_unit, vocab, counts, is_counted, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens near the least likely token that top-k keeps and near the one that top-p keeps.

    bound: a z that the k-th largest z is not below, or -inf. counts: of the bins, if is_counted.

    Returns (count, floor, wanted, sure, noisy, token):
    - count: the number of copies, more than CAPACITY if the limits are not found. 0: the tokens below are all that are
      kept.
    - floor: the smallest z that top-k and the argument `floor` keep.
    - wanted: the sum that the weights of top-p's tokens must reach.
    - sure, noisy, token: of the tokens that both filters keep for sure, which are not copied, the sum of the weights,
      the best noisy z, and its token."""
    fits, is_drawn, rounds, token = False, False, tl.full((), 0, tl.int32), NO_TOKEN
    begin, end, kth_begin, kth_end = 0, NO_KEY, NO_KEY, NO_KEY
    if bound > float("-inf"):
        kth_begin = keys_of(bound, bound, per_unit)
        end, kth_end = kth_begin, tl.minimum(kth_begin + 1, NO_KEY)
    else:
        if is_counted == 0:
            counts = _count(source, largest, temperature, floor, per_unit, vocab, TILE)
        fits, begin, end, kth_begin, kth_end = _choose(counts, per_unit, share, limit, is_limited, CAPACITY)
    while (rounds < _MOST_ROUNDS) & (fits == 0) & (is_drawn == 0):
        fits, is_drawn, token, begin, end, kth_begin, kth_end = divide(
            source, scratch, largest, temperature, floor, share, limit, begin, end, kth_begin, kth_end, first_key,
            second_key, scale, per_unit, vocab, TILE, CAPACITY,
        )  # fmt: skip
        rounds += 1
    count, wanted = CAPACITY + 1, tl.full((), 0.0, tl.float64)
    sure, noisy = tl.full((), 0, tl.int64), tl.full((), 0.0, tl.float32)
    if is_drawn:
        count = 0
    if fits:
        count, floor, wanted, sure, noisy, token = _copy(
            source, scratch, largest, temperature, floor, share, limit, begin, end, kth_begin, kth_end, first_key,
            second_key, scale, per_unit, vocab, TILE, CAPACITY,
        )  # fmt: skip
    return count, floor, wanted, sure, noisy, token


@triton.jit
def _count(source, largest, temperature, floor, per_unit, vocab, TILE: tl.constexpr):
    """The tokens in each bin."""
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, vocab, TILE):
        z, _tokens = tile(source, start, start, vocab, largest, temperature, TILE, False)
        counts += tl.histogram(keys_of(z, floor, per_unit) >> BIN_BITS, BINS)
    return counts


@triton.jit
def _choose(counts, per_unit, share, limit, is_limited, CAPACITY: tl.constexpr):
    """Which tokens to copy: those with begin <= key < end, or kth_begin <= key < kth_end.

    Returns whether they fit and contain both limits for sure; and begin, end, kth_begin and kth_end. If they do not
    fit, these are the keys that the limits may have. kth is the bin of the k-th largest logit."""
    places = tl.arange(0, BINS)
    counts = tl.where(places < _LAST, counts, 0)
    reached = tl.cumsum(counts, 0)
    before = reached - counts
    # If it is the last bin, top-k keeps every token that can be drawn.
    kth = tl.where(is_limited, tl.minimum(tl.sum((reached < limit).to(tl.int32), 0), _LAST), _LAST)
    num_kth, before_kth = at(places, kth, counts), at(places, kth, before)
    room = CAPACITY - num_kth
    earliest, latest, begin, end = kth, kth, kth, kth
    if share < 1:
        # Estimate the bin where top-p ends, and take tokens on both sides of it.
        per_bin = per_unit / 2.0**BIN_BITS
        masses = counts * tl.exp(-(places + 0.5) / per_bin)
        sums = tl.cumsum(masses, 0)
        mass_kth = at(places, kth, masses)
        mass = at(places, kth, sums) - mass_kth
        part = (limit - before_kth) / tl.maximum(num_kth, 1).to(tl.float32)
        wanted = share * (mass + part * mass_kth)
        most = tl.minimum(kth, _LAST - 1)
        middle = tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), most)
        # Each mass has a relative error of up to half a bin's width. In the worst case, all masses before top-p's end
        # are too large and all others too small, or the reverse. `wrong` is the relative error of the sum then.
        # `latest` assumes that top-k keeps all of bin kth.
        wrong = 1.1 * (1 - share) / per_bin
        earliest = tl.minimum(tl.sum((sums < wanted * (1 - wrong)).to(tl.int32), 0), most)
        latest = tl.minimum(tl.sum((sums < share * (mass + mass_kth) * (1 + wrong)).to(tl.int32), 0), most)
        num_middle, before_middle = at(places, middle, counts), at(places, middle, before)
        num_middle = tl.where(middle < kth, num_middle, 0)
        room -= num_middle
        quota = tl.maximum(room, 0) // 2
        begin = tl.sum((before < before_middle - quota).to(tl.int32), 0)
        more = reached - tl.where(places >= kth, num_kth, 0)
        end = tl.minimum(tl.sum((more <= before_middle + num_middle + quota).to(tl.int32), 0) - 1, most)
    fits = (room >= 0) & (begin <= earliest) & (end >= latest)
    begin = tl.minimum(tl.where(fits, begin, earliest), kth)
    end = tl.minimum(tl.where(fits, end, latest) + 1, kth)
    kth_end = tl.minimum(kth + 1, _LAST)
    return fits, begin << BIN_BITS, end << BIN_BITS, kth << BIN_BITS, kth_end << BIN_BITS


@triton.jit
def _copy(
    source, scratch, largest, temperature, floor, share, limit, begin, end, kth_begin, kth_end, first_key, second_key,
    scale, per_unit, vocab, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens with begin <= key < end or kth_begin <= key < kth_end. The k-th largest logit has a key of the
    second range; if kth_begin is NO_KEY, top-k keeps all tokens. Returns what copy_around_limits() returns."""
    values, ids = copies_of(scratch, CAPACITY)
    sure, whole = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.full((TILE,), NO_TOKEN, tl.int32)
    count, passed = 0, 0
    for start in range(0, vocab, TILE):
        z, tokens = tile(source, ids, start, vocab, largest, temperature, TILE, False)
        keys, weights = keys_of(z, floor, per_unit), weights_of(z, scale)
        sure += tl.where(keys < begin, weights, 0)
        whole += tl.where(keys < kth_begin, weights, 0)
        noisy = tl.where(keys < begin, z - tl.log(clock(tokens, first_key, second_key)), float("-inf"))
        larger = noisy > best
        best = tl.where(larger, noisy, best)
        best_ids = tl.where(larger, tokens, best_ids)
        taken = ((keys >= begin) & (keys < end)) | ((keys >= kth_begin) & (keys < kth_end))
        spots = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(values + spots, z, mask=taken & (spots < CAPACITY))
        tl.store(ids + spots, tokens, mask=taken & (spots < CAPACITY))
        count += tl.sum(taken.to(tl.int32), 0)
        passed += tl.sum(((keys < kth_begin) & (taken == 0)).to(tl.int32), 0)
    tl.debug_barrier()
    noisy = tl.max(best, 0)
    token = tl.min(tl.where(best == noisy, best_ids, NO_TOKEN), 0)
    sum_sure = tl.sum(sure, 0)
    kept = floor
    if kth_begin < NO_KEY:
        kept = tl.maximum(floor, kth_largest(values, ids, count, 0.0, 1.0, limit - passed, TILE, True))
    around, in_kth = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    for start in range(0, count, TILE):
        z, _tokens = tile(values, ids, start, count, 0.0, 1.0, TILE, True)
        keys, weights = keys_of(z, floor, per_unit), tl.where(z >= kept, weights_of(z, scale), 0)
        around += tl.where(keys < end, weights, 0)
        in_kth += tl.where(keys >= kth_begin, weights, 0)
    wanted = wanted_sum(tl.sum(whole, 0) + tl.sum(in_kth, 0), share)
    is_reached = (end >= kth_begin) | ((sum_sure + tl.sum(around, 0)).to(tl.float64) >= wanted)
    is_found = (share >= 1) | ((sum_sure.to(tl.float64) < wanted) & is_reached)
    count = tl.where(is_found, count, CAPACITY + 1)
    return count, tl.where(is_found, kept, floor), wanted, sum_sure, noisy, token
