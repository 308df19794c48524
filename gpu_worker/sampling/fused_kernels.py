"""Triton kernels that sample a token of each row of logits, and score it, in a few passes over the logits.

One program computes one row, so a row's result cannot depend on the other rows. In these kernels `z` is a logit after
the temperature: (logit - largest logit of the row) / temperature, so at most 0.

No kernel sorts the vocabulary:

- Top-k first finds a bound: the k-th largest of the lanes' maxima (lane i has the i-th value of each tile). The k
  largest logits are not below it, and few other logits are above it. These candidates are copied to `scratch`, and
  everything else examines only them.
- Top-p computes no threshold; it rejects draws. A token is drawn, and the weights of all tokens that are more likely
  are added. If the sum reaches top_p, top-p does not keep the token, and the next draw is among the more likely tokens.
  Each token has one random number for all draws (gumbel.py). So if the winner of a draw among too many tokens is one
  that top-p keeps, it would also win the draw among only the kept tokens. (FlashInfer rejects draws in the same way,
  but with new random numbers for each draw.)
- A small top_p without top-k takes its candidates as top-k does. They are used only if their weights reach top_p of the
  row's sum. The pass that copies them also counts for the first histogram, in case that they do not.
- For any other top-k or top-p, counts name the tokens around the limits of both (fused_limits.py). These are the
  candidates, and the more likely tokens are kept for sure. A row takes at most four passes over its logits. The
  exceptions are named there. In the last of them, rows draw from the whole row, and repeat rejected draws. With both
  top-k and top-p, four earlier passes find the k-th largest logit, digit by digit.
- A row with neither draws from the whole row.

The order in which a kernel adds differs between the types of logits. So weights are whole numbers, as in filters.py:
their sum is the same in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.sampling.fused_limits import copy_around_limits
from gpu_worker.sampling.fused_values import (
    BIN_BITS,
    BINS,
    NO_TOKEN,
    clock,
    copies_of,
    keys_of,
    keys_per_unit,
    kth_largest,
    tile,
    wanted_sum,
    weights_of,
)

# Values that a program examines at once.
TILE = 4096
# How many candidates of a row fit into its scratch memory; at least TILE. A top_k of 3,072 has about 5,700.
MAX_CANDIDATES = 8192

# With a smaller top_p, candidates are copied first.
_SMALL_SHARE: tl.constexpr = tl.constexpr(0.75)
# The scale of exp(z) in sums for log probabilities: 2**44 times 2**17 tokens fits into int64.
_SCORE_SCALE: tl.constexpr = tl.constexpr(2.0**44)
_SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit(do_not_specialize_on_alignment=["parameters"])
def sample_rows(
    logits, row_stride, parameters, scratch, tokens, failed, vocab, scale, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """A token of each row.

    logits: [rows, vocab], any float type. parameters: see parameters_of() in fused.py. scratch: int64
    [rows, 7 * CAPACITY / 4], for copies_of() or the cells of fused_cells.py. tokens: int64 [rows], 0 for a failed row.
    failed: bool [rows]. scale: the weight of a row's most likely token."""
    row = tl.program_id(0).to(tl.int64)
    source, scratch = logits + row * row_stride, scratch + row * (7 * CAPACITY // 4)
    values, ids = copies_of(scratch, CAPACITY)
    own = parameters + row * 6
    temperature = tl.load(own).to(tl.float32, bitcast=True)
    min_p = tl.load(own + 1).to(tl.float32, bitcast=True)
    floor = tl.where(min_p > 0, tl.log(tl.maximum(min_p, _SMALLEST)), float("-inf"))
    share = tl.load(own + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(own + 3)
    first_key = tl.load(own + 4).to(tl.uint32, bitcast=True)
    second_key = tl.load(own + 5).to(tl.uint32, bitcast=True)

    best, best_ids, lowest, broken = _lane_maxima(source, vocab, TILE)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, best_ids, NO_TOKEN), 0)
    fails = (broken > 0) | (tl.abs(largest) == float("inf"))
    if (temperature > 0) & (fails == 0):
        limit = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab)
        is_limited = limit < vocab
        count = CAPACITY + 1
        wanted = tl.full((), 0.0, tl.float64)
        is_whole = is_limited
        # Of the tokens that are kept for sure, and are not copied: the weight, and the draw.
        sure, sure_noisy, sure_token = tl.full((), 0, tl.int64), float("-inf"), NO_TOKEN
        per_unit, least = keys_per_unit(largest, lowest, temperature, scale), float("-inf")
        counts, is_counted = tl.zeros((BINS,), tl.int32), (is_limited == 0) & (share < _SMALL_SHARE)
        if (is_limited & (limit <= 3 * TILE // 4)) | is_counted:
            num_best = tl.minimum(limit, TILE // 4)
            if is_limited:
                num_best = limit
            count, total, copied, bound, counts = _copy_candidates(
                source, best, largest, temperature, floor, num_best, scale, values, ids, vocab, per_unit,
                is_counted, False, TILE, CAPACITY,
            )  # fmt: skip
            if is_limited:
                least = bound  # the k-th largest is `bound`, or above it
            wanted = wanted_sum(total, share)
            if (is_limited == 0) & (copied.to(tl.float64) < wanted):  # top-p keeps more than the candidates
                count = CAPACITY + 1
            if is_limited & (share < 1) & (count <= CAPACITY):
                kth = kth_largest(values, ids, count, 0.0, 1.0, tl.minimum(limit, count), TILE, True)
                floor = tl.maximum(floor, kth)
        if (count > CAPACITY) & (is_limited | (share < 1)):
            count, floor, wanted, sure, sure_noisy, sure_token = copy_around_limits(
                source, scratch, largest, temperature, floor, share, limit, is_limited, least, first_key, second_key,
                scale, per_unit, vocab, counts, is_counted, TILE, CAPACITY,
            )  # fmt: skip
            is_whole = False
            if count <= CAPACITY:
                limit = vocab
        if count <= CAPACITY:
            share = tl.where(count > 0, share, 1.0)  # without copies, all that is kept is kept for sure
            token, noisy = _draw(
                values, ids, count, 0.0, 1.0, floor, share, limit, wanted, is_whole, sure, vocab, first_key, second_key,
                scale, TILE, True,
            )  # fmt: skip
            is_sure = (sure_noisy > noisy) | ((sure_noisy == noisy) & (sure_token < token))
            token = tl.where(is_sure, sure_token, token)
        else:
            if is_limited & (share < 1):
                kth = kth_largest(source, ids, vocab, largest, temperature, limit, TILE, False)
                floor = tl.maximum(floor, kth)
            token, _noisy = _draw(
                source, ids, vocab, largest, temperature, floor, share, limit, wanted, True, 0, vocab, first_key,
                second_key, scale, TILE, False,
            )  # fmt: skip
    tl.store(tokens + row, tl.where(fails, 0, token).to(tl.int64))
    tl.store(failed + row, fails)


@triton.jit(do_not_specialize=["num_top"])
def score_rows(
    logits, row_stride, rows, tokens, scratch, sampled, top_ids, top, vocab, num_top,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The log probabilities of some rows' sampled tokens, and of their most likely tokens.

    logits: [rows, vocab]. rows: int64 [scored], the rows of logits. tokens: int64 [scored]. scratch: int64
    [scored, CAPACITY], for copies_of(). sampled: float32 [scored]. top_ids, top: int64 and float32
    [scored, num_top], best first; among equals the lower id first."""
    place = tl.program_id(0).to(tl.int64)
    source = logits + tl.load(rows + place) * row_stride
    values, ids = copies_of(scratch + place * CAPACITY, CAPACITY)
    best, _best_ids, _lowest, broken = _lane_maxima(source, vocab, TILE)
    largest = tl.max(best, 0)
    limit = tl.minimum(tl.maximum(num_top, 1), 3 * TILE // 4)
    count, total, _copied, _bound, _counts = _copy_candidates(
        source, best, largest, 1.0, float("-inf"), limit, _SCORE_SCALE, values, ids, vocab, 1.0, False, True, TILE,
        CAPACITY,
    )  # fmt: skip
    if num_top > limit:
        count = CAPACITY + 1
    # If only `count` logits are finite, and num_top is larger, tokens with -inf follow. Of the first num_top + count
    # ids, at least num_top have -inf.
    first = tl.minimum(vocab, num_top + count)
    log_total = tl.log((total.to(tl.float64) / _SCORE_SCALE).to(tl.float32))
    if broken > 0:
        log_total = float("nan")
    x = tl.load(source + tl.load(tokens + place)).to(tl.float32)
    tl.store(sampled + place, x - largest - log_total)
    last, last_id = float("inf"), -1
    for rank in range(0, num_top):
        if (count <= CAPACITY) & (rank < count):
            last, last_id = _next_likely(values, ids, count, 0.0, last, last_id, TILE, True)
        elif count <= CAPACITY:
            last_id = tl.where(rank == count, -1, last_id)
            last, last_id = _next_likely(source, ids, first, largest, float("-inf"), last_id, TILE, False)
        else:
            last, last_id = _next_likely(source, ids, vocab, largest, last, last_id, TILE, False)
        tl.store(top_ids + place * num_top + rank, tl.minimum(last_id, vocab - 1).to(tl.int64))
        tl.store(top + place * num_top + rank, last - log_total)


@triton.jit
def _lane_maxima(source, vocab, TILE: tl.constexpr):
    """For each lane its largest logit and the first token that has it; the row's smallest finite logit; and whether the
    row contains a NaN."""
    lanes = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = lanes
    lowest = tl.full((TILE,), float("inf"), tl.float32)
    broken = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab, TILE):
        ids = start + lanes
        x = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        broken += (x != x).to(tl.int32)
        larger = x > best
        best = tl.where(larger, x, best)
        best_ids = tl.where(larger, ids, best_ids)
        lowest = tl.where((x < lowest) & (x > float("-inf")), x, lowest)
    return best, best_ids, tl.min(lowest, 0), tl.sum(broken, 0)


@triton.jit
def _copy_candidates(
    source, best, largest, temperature, floor, limit, scale, values, ids, vocab, per_unit, is_counted,
    FIRST_EQUALS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy all tokens that may be among the `limit` largest, z and id. Returns (count, total, copied, bound, counts):
    the number of these tokens (above CAPACITY the copy is incomplete); the sum of the weights with z >= floor, of all
    tokens and of the copied ones; the smallest z that is copied; if is_counted, how many tokens each bin has.
    FIRST_EQUALS: of the tokens with the smallest z, copy only the first `limit`."""
    tl.static_assert(CAPACITY >= TILE)
    lanes = tl.arange(0, TILE)
    tl.store(values + lanes, tl.div_rn(best - largest, temperature))
    tl.debug_barrier()
    bound = kth_largest(values, ids, TILE, 0.0, 1.0, limit, TILE, True)
    tl.debug_barrier()
    count, equals = 0, 0
    total = tl.zeros((TILE,), tl.int64)
    copied = tl.zeros((TILE,), tl.int64)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, vocab, TILE):
        z, tokens = tile(source, ids, start, vocab, largest, temperature, TILE, False)
        weights = tl.where(z >= floor, weights_of(z, scale), 0)
        total += weights
        taken = (z >= bound) & (z > float("-inf"))
        if FIRST_EQUALS:
            equal = taken & (z == bound)
            taken = taken & ((z > bound) | (equals + tl.cumsum(equal.to(tl.int32), 0) <= limit))
            equals += tl.sum(equal.to(tl.int32), 0)
        copied += tl.where(taken, weights, 0)
        places = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        fits = taken & (places < CAPACITY)
        tl.store(values + places, z, mask=fits)
        tl.store(ids + places, tokens, mask=fits)
        count += tl.sum(taken.to(tl.int32), 0)
        if is_counted:
            counts += tl.histogram(keys_of(z, floor, per_unit) >> BIN_BITS, BINS)
    tl.debug_barrier()
    return count, tl.sum(total, 0), tl.sum(copied, 0), bound, counts


@triton.jit
def _draw(
    source, ids, count, largest, temperature, floor, share, limit, wanted, is_whole, sure, vocab, first_key, second_key,
    scale, TILE: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens with z >= floor that top-p (`share`) and top-k (`limit` tokens) keep. Returns the token and
    its noisy z, which is z plus the token's noise. is_whole: `share` is a share of the weights of these tokens.
    Otherwise top-p keeps tokens until the sum of the weights reaches `wanted`. The sum begins with `sure`, the weights
    of more likely tokens that are not in `source`."""
    total, _count, token, z, noisy = _draw_above(
        source, ids, count, largest, temperature, floor, float("-inf"), first_key, second_key, scale, TILE, COPIED
    )
    if (share < 1) | (limit < vocab):
        if is_whole:
            wanted = wanted_sum(total, share)
        rejected = 1
        while rejected > 0:
            weight, number, next_token, next_z, next_noisy = _draw_above(
                source, ids, count, largest, temperature, floor, z, first_key, second_key, scale, TILE, COPIED
            )
            kept = ((share >= 1) | ((sure + weight).to(tl.float64) < wanted)) & (number < limit)
            rejected = tl.where(kept, 0, 1)
            token = tl.where(kept, token, next_token)
            z = tl.where(kept, z, next_z)
            noisy = tl.where(kept, noisy, next_noisy)
    return token, noisy


@triton.jit
def _draw_above(
    source, ids, count, largest, temperature, floor, above, first_key, second_key, scale,
    TILE: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Of the tokens with z >= floor and z > above: the sum of their weights, their number, the drawn token, its z, and
    its noisy z."""
    weights = tl.zeros((TILE,), tl.int64)
    numbers = tl.zeros((TILE,), tl.int32)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.full((TILE,), NO_TOKEN, tl.int32)
    best_z = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, count, TILE):
        z, tokens = tile(source, ids, start, count, largest, temperature, TILE, COPIED)
        taken = (z >= floor) & (z > above)
        weights += tl.where(taken, weights_of(z, scale), 0)
        numbers += taken.to(tl.int32)
        noisy = tl.where(taken, z - tl.log(clock(tokens, first_key, second_key)), float("-inf"))
        larger = (noisy > best) | ((noisy == best) & (tokens < best_ids))
        best = tl.where(larger, noisy, best)
        best_ids = tl.where(larger, tokens, best_ids)
        best_z = tl.where(larger, z, best_z)
    winner = tl.max(best, 0)
    token = tl.min(tl.where(best == winner, best_ids, NO_TOKEN), 0)
    z = tl.max(tl.where((best == winner) & (best_ids == token), best_z, float("-inf")), 0)
    return tl.sum(weights, 0), tl.sum(numbers, 0), token, z, winner


@triton.jit
def _next_likely(source, ids, count, largest, last, last_id, TILE: tl.constexpr, COPIED: tl.constexpr):
    """z and id of the token that follows `last` in the order of likelihood, the lower id first among equals."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.full((TILE,), NO_TOKEN, tl.int32)
    for start in range(0, count, TILE):
        z, tokens = tile(source, ids, start, count, largest, 1.0, TILE, COPIED)
        follows = (z < last) | ((z == last) & (tokens > last_id))
        follows = follows & (start + tl.arange(0, TILE) < count)
        larger = follows & ((z > best) | ((z == best) & (tokens < best_ids)))
        best = tl.where(larger, z, best)
        best_ids = tl.where(larger, tokens, best_ids)
    z = tl.max(best, 0)
    return z, tl.min(tl.where(best == z, best_ids, NO_TOKEN), 0)
