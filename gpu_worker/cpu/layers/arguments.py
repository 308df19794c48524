"""The arguments of the function for all layers: their places in its arrays, because it takes only addresses."""

# Addresses of arrays, then sizes.
(
    TOKENS,  # int64 [rows]; without layers, HIDDEN is given instead, and only LOGITS or LIKELIEST are computed
    POSITIONS,  # int64 [rows]
    SLOTS,  # int64 [rows]: block * block_size + place in the block
    BLOCK_IDS,  # int32 [num_block_ids]
    FIRST_BLOCKS,  # int32 [num_attending]
    KV_LENS,  # int32 [num_attending]
    ROWS,  # int32 [num_attending]: rows that decode attention computes, each by itself
    CHUNKS,  # int32 [num_chunks, 4]: of PlannedRows
    PACKED_KEYS,  # its scratch memory
    SEEN_VALUES,
    WANTED,  # int64 [num_wanted]: the rows of the result, unless it has all rows
    WANTED_FIRST_BLOCKS,  # int32 [num_wanted], as FIRST_BLOCKS, KV_LENS and ROWS; with SKIPS_QUERIES alone
    WANTED_KV_LENS,
    WANTED_ROWS,
    HIDDEN,  # the result: [num_wanted, width]
    LOGITS,  # another result: [rows, vocab]; 0: none
    LIKELIEST,  # another result: int64 [rows], of each row the first token with the largest logit; 0: none
    FAILED,  # bool [rows], with LIKELIEST: whether that logit is infinite or NaN
    EMBEDDING,  # [vocab, width]
    TURNS,  # float32 [positions, head_dim]
    FINAL_NORM,  # [width]
    HEAD,  # a packed matrix, or [vocab, width] with HEAD_IS_TABLE
    KEYS,  # [layers, blocks, block_size, kv_heads, head_dim]
    VALUES,
    WINDOWS,  # int64 [layers]; 0: none
    CODES,  # the arrays of LogitBounds
    SCALES,
    ERRORS,
    BLOCK_BOUNDS,
    UPPER_BOUNDS,  # scratch memory of likeliest_part(): float32 [rows, blocks]
    FOUND,  # int32 [2, threads, rows, 2]
    THRESHOLDS,  # float32 [rows]
    TRIED,  # int64 [threads]
    LAYERS,  # int64 [layers, NUM_LAYER_ARRAYS]
    STREAM,  # scratch memory: [rows, width], hidden states; HIDDEN itself if the result has all rows
    NORMED,  # [rows, width]
    PROJECTED,  # [rows, (heads + 2 * kv_heads) * head_dim]
    MIXED,  # [rows, heads * head_dim]: results of attention; before that, with SKIPS_QUERIES, the wanted queries
    GATE_UP,  # [rows, 2 * inner]
    ACTIVATED,  # [rows, inner]
    ARRIVED,  # int64 [3], 0 at the start: arrivals at meetings; whether a thread has given up; threads at the end
    TAKEN,  # int64 [threads * COUNTER], 0 at the start: the counters of next_unit()
    NUM_ROWS,
    NUM_ATTENDING,
    NUM_CHUNKS,
    NUM_WANTED,
    SKIPS_QUERIES,  # 1: the last layer computes attention for the wanted rows alone
    NUM_BLOCK_IDS,
    NUM_SCRATCH,  # elements of PACKED_KEYS and of SEEN_VALUES
    NUM_LAYERS,
    NUM_BLOCKS,
    BLOCK_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    WIDTH,
    INNER,
    VOCAB,
    NUM_POSITIONS,
    HEAD_IS_TABLE,
) = range(60)
NUM_ARGUMENTS = 60
# The arrays of a layer, by their place in a row of LAYERS. 0: the layer has no such array.
INPUT_NORM, QKV, QKV_BIAS, HEAD_NORMS, OUTPUT, MLP_NORM, GATE_UP_MATRIX, DOWN = range(8)
NUM_LAYER_ARRAYS = 8
# The places of float32 arguments.
EPS, SCALE = range(2)
