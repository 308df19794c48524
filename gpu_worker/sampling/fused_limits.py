"""Top-k and top-p for many tokens, in two passes over a row's logits.

The first pass counts the tokens in bins of z. The counts name the bin of the k-th largest logit, and estimate where
top-p ends. The second pass copies the tokens around both limits to scratch memory, draws among the tokens that are kept
for sure, and sums the weights. These sums are exact. So they show whether both limits are among the copies, whatever
the estimate was.

The first pass only counts, because Triton counts in a multiprocessor's own memory. Sums of weights by bin would be
atomic additions to device memory."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.sampling.fused_values import BINS, NO_TOKEN, clock, kth_largest, tile, wanted_sum, weights_of


@triton.jit
def copy_around_limits(
    source, largest, lowest, temperature, floor, share, limit, is_limited, first_key, second_key, scale, values, ids,
    vocab, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens near the least likely token that top-k keeps and near the one that top-p keeps.

    Returns the number of copies, more than CAPACITY if they do not contain both limits; the smallest z that top-k and
    `floor` keep; the sum that the weights of top-p's tokens must reach; and of the tokens that both filters keep for
    sure, which are not copied: the sum of the weights, the best noisy z, and its token."""
    last = BINS - 1
    # A smaller z has no weight, and no clock (gumbel.py) makes its token win.
    depth = tl.minimum(tl.maximum(tl.log(scale) + 1, 26.0), tl.div_rn(largest - lowest, temperature))
    bins_per_unit = tl.div_rn(BINS - 2.0, tl.maximum(depth, 1e-30))
    places = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, vocab, TILE):
        z, _tokens = tile(source, ids, start, vocab, largest, temperature, TILE, False)
        counts += tl.histogram(_bins(z, floor, bins_per_unit), BINS)
    counts = tl.where(places < last, counts, 0)
    reached = tl.cumsum(counts, 0)
    before = reached - counts

    # The bin of the k-th largest logit. If it is the last bin, top-k keeps every token that can be drawn.
    kth_bin = tl.minimum(tl.sum((reached < limit).to(tl.int32), 0), last)
    if is_limited == 0:
        kth_bin = last
    num_kth, before_kth = _at(places, kth_bin, counts), _at(places, kth_bin, before)
    begin, end, room = kth_bin, kth_bin, CAPACITY - num_kth
    if share < 1:
        # Estimate the bin where top-p ends, and take tokens on both sides of it.
        masses = counts * tl.exp(-(places + 0.5) / bins_per_unit)
        part = (limit - before_kth) / tl.maximum(num_kth, 1).to(tl.float32)
        mass = tl.sum(tl.where(places < kth_bin, masses, 0), 0) + part * _at(places, kth_bin, masses)
        middle = tl.sum((tl.cumsum(masses, 0) < mass * share).to(tl.int32), 0)
        middle = tl.minimum(middle, tl.minimum(kth_bin, last - 1))
        num_middle, before_middle = _at(places, middle, counts), _at(places, middle, before)
        room -= tl.where(middle < kth_bin, num_middle, 0)
        quota = tl.maximum(room, 0) // 2
        begin = tl.sum((before < before_middle - quota).to(tl.int32), 0)
        end = tl.sum((reached <= before_middle + num_middle + quota).to(tl.int32), 0) - 1
        end = tl.minimum(end, tl.minimum(kth_bin, last - 1))

    count = CAPACITY + 1
    wanted = tl.full((), 0.0, tl.float64)
    sure, noisy, token = tl.full((), 0, tl.int64), float("-inf"), NO_TOKEN
    if room >= 0:
        sure, whole, noisy, token, count = _copy_bins(
            source, largest, temperature, floor, bins_per_unit, begin, end, kth_bin, first_key, second_key, scale,
            values, ids, vocab, TILE, CAPACITY,
        )  # fmt: skip
        kept = floor
        if kth_bin < last:
            rank = limit - before_kth + count - num_kth
            kept = tl.maximum(floor, kth_largest(values, ids, count, 0.0, 1.0, rank, TILE, True))
        around, in_kth = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        for start in range(0, count, TILE):
            z, _tokens = tile(values, ids, start, count, 0.0, 1.0, TILE, True)
            bins, weights = _bins(z, floor, bins_per_unit), tl.where(z >= kept, weights_of(z, scale), 0)
            around += tl.where(bins <= end, weights, 0)
            in_kth += tl.where(bins == kth_bin, weights, 0)
        wanted = wanted_sum(whole + tl.sum(in_kth, 0), share)
        is_reached = (sure + tl.sum(around, 0)).to(tl.float64) >= wanted
        contains = (sure.to(tl.float64) < wanted) & (is_reached | (end >= tl.minimum(kth_bin, last - 1)))
        if (share < 1) & (contains == 0):
            count = CAPACITY + 1
        floor = kept
    return count, floor, wanted, sure, noisy, token


@triton.jit
def _copy_bins(
    source, largest, temperature, floor, bins_per_unit, begin, end, kth_bin, first_key, second_key, scale, values, ids,
    vocab, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens of the bins begin..end and kth_bin. Returns the sums of the weights before `begin` and before
    kth_bin, the best noisy z before `begin` and its token, and the number of copies."""
    sure, whole = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.full((TILE,), NO_TOKEN, tl.int32)
    count = 0
    for start in range(0, vocab, TILE):
        z, tokens = tile(source, ids, start, vocab, largest, temperature, TILE, False)
        bins, weights = _bins(z, floor, bins_per_unit), weights_of(z, scale)
        sure += tl.where(bins < begin, weights, 0)
        whole += tl.where(bins < kth_bin, weights, 0)
        noisy = tl.where(bins < begin, z - tl.log(clock(tokens, first_key, second_key)), float("-inf"))
        larger = noisy > best
        best = tl.where(larger, noisy, best)
        best_ids = tl.where(larger, tokens, best_ids)
        taken = (((bins >= begin) & (bins <= end)) | (bins == kth_bin)) & (bins < BINS - 1)
        spots = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(values + spots, z, mask=taken & (spots < CAPACITY))
        tl.store(ids + spots, tokens, mask=taken & (spots < CAPACITY))
        count += tl.sum(taken.to(tl.int32), 0)
    tl.debug_barrier()
    noisy = tl.max(best, 0)
    token = tl.min(tl.where(best == noisy, best_ids, NO_TOKEN), 0)
    return tl.sum(sure, 0), tl.sum(whole, 0), noisy, token, count


@triton.jit
def _bins(z, floor, bins_per_unit):
    """The bin of z. The last bin has all else, and the tokens below `floor`."""
    places = tl.minimum(-z * bins_per_unit, BINS - 1.0)
    return tl.where(z >= floor, places, BINS - 1.0).to(tl.int32)


@triton.jit
def _at(places, place, values):
    """The value at a place."""
    return tl.sum(tl.where(places == place, values, 0), 0)
