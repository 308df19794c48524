"""The function for all layers: what one of its threads computes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from gpu_worker.cpu.chunk_attention import attend_part, pack_part
from gpu_worker.cpu.decode_attention import WIDTH, attend_heads_narrow, attend_heads_wide
from gpu_worker.cpu.layer_kernels import gated, norm, rotate
from gpu_worker.cpu.layers import arguments as at
from gpu_worker.cpu.layers.likeliest import likeliest_part
from gpu_worker.cpu.numbers import FASTMATH, load, store
from gpu_worker.cpu.products import FIRST, NO, YES, multiply_part, multiply_table_part
from gpu_worker.cpu.threads import COUNTER, add_one, array_at, meet, next_unit, shared_work
from gpu_worker.cpu.vectors import OUTPUTS

# With up to so many rows, each thread computes the norms of all rows for itself, because a meeting takes longer.
_OWN_NORMS = 32

_norm = njit(fastmath=FASTMATH)(norm)
_rotate = njit(fastmath=FASTMATH)(rotate)


# Small functions below are inlined, because by themselves they take longer to compile. Large ones are not, because
# numba copies an inlined function several times.
def all_layers(like: Any, arguments: Any, numbers: Any, thread: int, threads: int) -> None:
    """A thread's part of all layers of any model, with longer chunks if its heads are of a multiple of 64. like: a
    pointer of the model's type."""
    a, singles = carray(arguments, (at.NUM_ARGUMENTS,)), carray(numbers, (2,))
    like, ints = carray(like, (0,)), np.empty(0, np.int32)
    eps, scale = singles[at.EPS], singles[at.SCALE]
    rows, width, inner, head_dim = a[at.NUM_ROWS], a[at.WIDTH], a[at.INNER], a[at.HEAD_DIM]
    num_heads, kv_heads, num_layers = a[at.NUM_HEADS], a[at.NUM_KV_HEADS], a[at.NUM_LAYERS]
    num_rotated, all_heads = num_heads + kv_heads, num_heads + 2 * kv_heads

    tokens, positions = array_at(a[at.TOKENS], rows, a), array_at(a[at.POSITIONS], rows, a)
    embedding = array_at(a[at.EMBEDDING], a[at.VOCAB] * width, like).reshape(a[at.VOCAB], width)
    turns = array_at(a[at.TURNS], a[at.NUM_POSITIONS] * head_dim, singles).reshape(a[at.NUM_POSITIONS], head_dim)
    slots = array_at(a[at.SLOTS], rows, a)
    result = array_at(a[at.HIDDEN], a[at.NUM_WANTED] * width, like).reshape(a[at.NUM_WANTED], width)
    hidden = array_at(a[at.STREAM], rows * width, like).reshape(rows, width)
    pool = num_layers, a[at.NUM_BLOCKS], a[at.BLOCK_SIZE], kv_heads, head_dim
    size = num_layers * a[at.NUM_BLOCKS] * a[at.BLOCK_SIZE] * kv_heads * head_dim
    keys, values = array_at(a[at.KEYS], size, like).reshape(pool), array_at(a[at.VALUES], size, like).reshape(pool)
    block_ids = array_at(a[at.BLOCK_IDS], a[at.NUM_BLOCK_IDS], ints)
    tables = _tables(a, block_ids, at.FIRST_BLOCKS, at.KV_LENS, at.ROWS, a[at.NUM_ATTENDING])
    few = a[at.NUM_WANTED] if a[at.SKIPS_QUERIES] else 0
    wanted_tables = _tables(a, block_ids, at.WANTED_FIRST_BLOCKS, at.WANTED_KV_LENS, at.WANTED_ROWS, few)
    chunks = array_at(a[at.CHUNKS], a[at.NUM_CHUNKS] * 4, ints).reshape(a[at.NUM_CHUNKS], 4)
    packed = (
        array_at(a[at.PACKED_KEYS], a[at.NUM_SCRATCH], like),
        array_at(a[at.SEEN_VALUES], a[at.NUM_SCRATCH], singles),
    )
    windows = array_at(a[at.WINDOWS], num_layers, a)
    layers = array_at(a[at.LAYERS], num_layers * at.NUM_LAYER_ARRAYS, a).reshape(num_layers, at.NUM_LAYER_ARRAYS)
    projected = array_at(a[at.PROJECTED], rows * all_heads * head_dim, like).reshape(rows, all_heads * head_dim)
    heads = projected.reshape(rows, all_heads, head_dim)
    mixed = array_at(a[at.MIXED], rows * num_heads * head_dim, like).reshape(rows, num_heads * head_dim)

    empty, work = like[:0], shared_work(array_at(a[at.TAKEN], threads * COUNTER, a), thread, threads)
    begin, end = rows * thread // threads, rows * (thread + 1) // threads
    angles = np.empty((end - begin, head_dim), np.float32)
    meetings = 0
    if num_layers:
        _copy_rows(turns, positions[begin:end], angles)
        _copy_rows(embedding, tokens[begin:end], hidden[begin:end])
        meetings = meet(_arrived(a), threads, meetings)
    for index in range(num_layers):
        layer = layers[index]
        # Nothing reads the other rows after the last layer, but their keys and values.
        skips_rows = index == num_layers - 1 and a[at.HIDDEN] != a[at.STREAM]
        skips_queries = skips_rows and a[at.SKIPS_QUERIES] != 0
        normed, meetings = _normed(a, hidden, layer[at.INPUT_NORM], eps, thread, threads, meetings)
        bias = array_at(layer[at.QKV_BIAS], projected.shape[1] if layer[at.QKV_BIAS] else 0, like)
        qkv = array_at(layer[at.QKV], width * projected.shape[1], like)
        first = num_heads * head_dim // OUTPUTS if skips_queries else 0
        multiply_part(normed, qkv, bias, NO, first, work, projected)
        meetings = meet(_arrived(a), threads, meetings)
        if skips_queries:
            matrix, own_bias = qkv[: mixed.shape[1] * width], bias[: mixed.shape[1]]
            meetings = _project_wanted(a, normed, matrix, own_bias, work, meetings, mixed, projected)

        has_norms = layer[at.HEAD_NORMS] != 0
        norms = array_at(layer[at.HEAD_NORMS] if has_norms else layer[at.INPUT_NORM], 2 * head_dim, like)
        norms = norms.reshape(2, head_dim)
        _rotate(heads[begin:end], num_rotated, angles, has_norms, norms, num_heads, eps)
        _write(heads[begin:end], num_heads, slots[begin:end], keys[index])
        _write(heads[begin:end], num_rotated, slots[begin:end], values[index])
        meetings = meet(_arrived(a), threads, meetings)

        queries, window = heads[:, :num_heads], windows[index]
        attending = wanted_tables if skips_queries else tables
        _attend_part(queries, keys[index], values[index], attending, window, scale, work, mixed)
        for number in range(0 if skips_queries else len(chunks)):
            chunk = block_ids, chunks[number]
            pool_part = keys[index], values[index]
            meetings = _attend_chunk(
                queries, pool_part, chunk, window, scale, packed, work, _arrived(a), meetings, mixed
            )
        meetings = meet(_arrived(a), threads, meetings)

        if skips_rows:
            wanted = array_at(a[at.WANTED], len(result), a)
            first, last = len(result) * thread // threads, len(result) * (thread + 1) // threads
            kept = array_at(a[at.PROJECTED], len(result) * mixed.shape[1], like).reshape(len(result), mixed.shape[1])
            _copy_rows(hidden, wanted[first:last], result[first:last])
            _copy_rows(mixed, wanted[first:last], kept[first:last])
            meetings = meet(_arrived(a), threads, meetings)
            hidden, mixed = result, kept

        output = array_at(layer[at.OUTPUT], width * mixed.shape[1], like)
        multiply_part(mixed, output, empty, YES, FIRST, work, hidden)
        meetings = meet(_arrived(a), threads, meetings)

        normed, meetings = _normed(a, hidden, layer[at.MLP_NORM], eps, thread, threads, meetings)
        matrix = array_at(layer[at.GATE_UP_MATRIX], width * 2 * inner, like)
        gate_up = array_at(a[at.GATE_UP], len(hidden) * 2 * inner, like).reshape(len(hidden), 2 * inner)
        multiply_part(normed, matrix, empty, NO, FIRST, work, gate_up)
        meetings = meet(_arrived(a), threads, meetings)

        activated = array_at(a[at.ACTIVATED], len(hidden) * inner, like).reshape(len(hidden), inner)
        _gate_part(gate_up, thread, threads, activated)
        meetings = meet(_arrived(a), threads, meetings)

        down = array_at(layer[at.DOWN], width * inner, like)
        multiply_part(activated, down, empty, YES, FIRST, work, hidden)
        meetings = meet(_arrived(a), threads, meetings)
    if a[at.LOGITS] or a[at.LIKELIEST]:
        normed, meetings = _normed(a, result, a[at.FINAL_NORM], eps, thread, threads, meetings)
        logits = array_at(a[at.LOGITS], len(result) * a[at.VOCAB], like).reshape(len(result), a[at.VOCAB])
        head = array_at(a[at.HEAD], width * a[at.VOCAB], like)
        if a[at.LIKELIEST]:
            _find_likeliest(a, normed, head, work, meetings)
        elif a[at.HEAD_IS_TABLE]:
            multiply_table_part(normed, head.reshape(a[at.VOCAB], width), work, logits)
        else:
            multiply_part(normed, head, empty, NO, FIRST, work, logits)
    add_one(_arrived(a), 2)


@njit(inline="always")
def _tables(a: Any, block_ids: Any, first_blocks: int, kv_lens: int, rows: int, count: int) -> Any:
    """What _attend_part() needs to know of `count` rows. first_blocks, kv_lens, rows: places of arguments."""
    first, lens, which = a[first_blocks], a[kv_lens], a[rows]
    return (
        block_ids,
        array_at(first, count, block_ids),
        array_at(lens, count, block_ids),
        array_at(which, count, block_ids),
    )


@njit(inline="always")
def _arrived(a: Any) -> Any:
    return array_at(a[at.ARRIVED], 3, a)


@njit(inline="always")
def _normed(a: Any, hidden: Any, weight: int, eps: float, thread: int, threads: int, meetings: int) -> Any:
    """All normed rows, and the number of meetings."""
    count, width = hidden.shape
    if count <= _OWN_NORMS:
        normed = np.empty_like(hidden)
        _norm(hidden, array_at(weight, width, hidden), eps, normed)
        return normed, meetings
    normed = array_at(a[at.NORMED], count * width, hidden).reshape(count, width)
    begin, end = count * thread // threads, count * (thread + 1) // threads
    _norm(hidden[begin:end], array_at(weight, width, hidden), eps, normed[begin:end])
    return normed, meet(_arrived(a), threads, meetings)


@njit(inline="always")
def _find_likeliest(a: Any, normed: Any, head: Any, work: Any, meetings: int) -> None:
    rows, blocks, threads = len(normed), (a[at.VOCAB] + OUTPUTS - 1) // OUTPUTS, work[3]
    floats, ints = np.empty(0, np.float32), np.empty(0, np.int32)
    copy = (
        array_at(a[at.CODES], blocks * OUTPUTS * normed.shape[1], np.empty(0, np.uint8)),
        array_at(a[at.SCALES], blocks * OUTPUTS, floats),
        array_at(a[at.ERRORS], blocks * OUTPUTS, floats),
        array_at(a[at.BLOCK_BOUNDS], blocks * 2, floats).reshape(blocks, 2),
    )
    scratch = (
        array_at(a[at.UPPER_BOUNDS], rows * blocks, floats).reshape(rows, blocks),
        array_at(a[at.FOUND], 4 * threads * rows, ints).reshape(2, threads, rows, 2),
        array_at(a[at.THRESHOLDS], rows, floats),
        array_at(a[at.TRIED], threads, a),
    )
    tokens, failed = array_at(a[at.LIKELIEST], rows, a), array_at(a[at.FAILED], rows, np.empty(0, np.bool_))
    is_table = a[at.HEAD_IS_TABLE] != 0
    likeliest_part(normed, head, is_table, copy, scratch, work, _arrived(a), meetings, tokens, failed)


@njit(inline="always")
def _project_wanted(
    a: Any, normed: Any, matrix: Any, bias: Any, work: Any, meetings: int, scratch: Any, projected: Any
) -> Any:
    """A thread's part of the wanted rows' products with `matrix`, as the first outputs of `projected`. Returns the
    number of meetings."""
    _, _, thread, threads = work
    count, outputs = a[at.NUM_WANTED], scratch.shape[1]
    wanted = array_at(a[at.WANTED], count, a)
    rows, out = np.empty((count, normed.shape[1]), normed.dtype), scratch[:count]
    _copy_rows(normed, wanted, rows)
    multiply_part(rows, matrix, bias, NO, FIRST, work, out)
    meetings = meet(_arrived(a), threads, meetings)
    for row in range(count * thread // threads, count * (thread + 1) // threads):
        for d in range(outputs):
            projected[wanted[row], d] = out[row, d]
    return meet(_arrived(a), threads, meetings)


@njit(_nrt=False)
def _write(heads: Any, first: int, slots: Any, pool: Any) -> None:
    """Copy the heads of each row from `first` on to the row's slot in a layer's keys or values."""
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[2], pool.shape[3]
    for row in range(len(slots)):
        block, token = slots[row] // block_size, slots[row] % block_size
        for k in range(kv_heads):
            # Of C order, which a slice of several heads would not have: so the compiler can use vector instructions.
            head, place = heads[row, first + k], pool[block, token, k]
            for d in range(head_dim):
                place[d] = head[d]


@njit(inline="always")
def _copy_rows(table: Any, which: Any, out: Any) -> None:
    for row in range(len(which)):
        for d in range(out.shape[1]):
            out[row, d] = table[which[row], d]


@njit(inline="always")
def _attend_part(
    query: Any, keys: Any, values: Any, tables: Any, window: int, scale: float, work: Any, out: Any
) -> None:
    """A thread's part of all rows. One thread takes all KV heads of a row, because they are side by side in memory. If
    there are more threads than rows, the threads share the heads, too."""
    block_ids, first_blocks, kv_lens, rows = tables
    kv_heads, threads = keys.shape[2], work[3]
    parts = min(kv_heads, threads) if len(kv_lens) < threads else 1
    unit = next_unit(work, len(kv_lens) * parts)
    while unit >= 0:
        i, part = unit // parts, unit % parts
        first, last = kv_heads * part // parts, kv_heads * (part + 1) // parts
        table = block_ids[first_blocks[i] :]
        if query.shape[2] % WIDTH == 0:
            attend_heads_wide(query, rows[i], keys, values, table, kv_lens[i], window, scale, first, last, out)
        else:
            attend_heads_narrow(query, rows[i], keys, values, table, kv_lens[i], window, scale, first, last, out)
        unit = next_unit(work, len(kv_lens) * parts)


@njit(inline="always")
def _attend_chunk(
    query: Any,
    pool: Any,
    chunk: Any,
    window: int,
    scale: float,
    scratch: Any,
    work: Any,
    arrived: Any,
    meetings: int,
    out: Any,
) -> int:
    """A thread's part of a chunk's attention. Returns the number of meetings."""
    (keys, values), (block_ids, sizes), (packed, seen) = pool, chunk, scratch
    first_block, first_row, count, kv_len = sizes[0], sizes[1], sizes[2], sizes[3]
    threads = work[3]
    meetings = meet(arrived, threads, meetings)  # the scratch memory is free, and all units before are taken
    pack_part(keys, values, block_ids[first_block:], count, kv_len, window, work, packed, seen)
    meetings = meet(arrived, threads, meetings)
    attend_part(query, keys, first_row, count, kv_len, window, scale, packed, seen, work, out)
    return meetings


@njit(fastmath=FASTMATH)
def _gate_part(gate_up: Any, thread: int, threads: int, out: Any) -> None:
    """A thread's part of out = silu(gate) * up."""
    (count, width), first, last = out.shape, 0, len(out)
    begin, end = width * thread // threads, width * (thread + 1) // threads
    if count > _OWN_NORMS:
        begin, end, first, last = 0, width, count * thread // threads, count * (thread + 1) // threads
    for row in range(first, last):
        gate, up, own = gate_up[row, begin:end], gate_up[row, width + begin : width + end], out[row, begin:end]
        for d in range(end - begin):
            store(own, d, gated(load(gate[d]), load(up[d])))
