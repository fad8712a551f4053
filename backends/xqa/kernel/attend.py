# mypy: ignore-errors
"""One tile of keys: scores, softmax, values. Every thread of the block takes part in each of the three steps.

Letters: g = lane // 4, t = lane % 4. A fragment and a lane's place in it: see `isa.py`.

Eight warps split the work differently in each step, and meet in shared memory:

    scores    warp w: rows x tokens x one part of D.  Of 16 and 32 rows a warp takes all, with queries in registers, and
              a key is read once per block; of 64 rows it takes a half, with queries in shared memory.
    softmax   ROW_LANES threads per row: add up the parts of D, scale, mask, exponentiate.
    values    warp w: all rows x all tokens x 64 of the 512 value dims.  Sums stay in registers.
"""

from mla.backends.xqa.isa import (
    exp2,
    high_e4m3_to_fp16,
    high_fp16,
    larger,
    ldmatrix_x2,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    low_e4m3_to_fp16,
    low_fp16,
    permute,
    set_shared_f32,
    set_shared_f32x2,
    set_shared_u32,
    set_shared_u32x2,
    shared_f32,
    shared_f32x2,
    shared_f32x4,
    shared_i32,
    shared_u16,
    shared_u32,
    shuffle_xor,
    thread_index,
)
from mla.backends.xqa.kernel.constants import (
    BIAS_AT,
    DECAY_AT,
    DIM_GROUPS,
    EIGHT_BIT,
    GROUP_BYTES,
    KEY_BYTES,
    QUERIES_AT,
    QUERIES_IN_SHARED,
    QUERY_PITCH,
    ROW_LANE_BITS,
    ROW_LANES,
    ROW_TILES,
    ROWS,
    SCORE_PITCH,
    SCORE_WORDS,
    SCORES_AT,
    SPAN,
    STEP_BYTES,
    STEPS,
    TILE,
    TOKEN_BLOCKS,
    TOKENS_AT,
    TOKENS_EACH,
    VALUE_BYTES,
    VALUE_LOADS,
    WARP_ROW_TILES,
    WEIGHT_PITCH,
    WEIGHT_WORDS,
    WIDENED,
    ZEROS_AT,
)
from mla.backends.xqa.kernel.memory import flip_of_token, part_of_warp
from mla.backends.xqa.kernel.numbers import (
    HEADROOM,
    LOWEST,
    NEGATIVE_INFINITY,
    cuda,
    float32,
    high_number,
    int32,
    larger_int,
    low_number,
    low_weight,
    mma_scores,
    mma_values,
    pack_weights,
    select,
    smaller_int,
    uint32,
    widen_keys,
)


def flip_of(row):
    """What is exclusive-or'ed into the place of a partial score: rows that are touched at once differ in banks."""
    return ((row & 1) << 6) | ((row & 2) << 4)


def find_places(smem, places):
    """Where this lane finds what `partial_scores` needs, once for all tiles: keys in a stage of them (four places, as
    every fourth step finds a key's chunks in the same order), queries, and its partial scores.
    """
    thread = thread_index()
    lane = thread & 31
    group, first_row, tokens = part_of_warp(thread)
    if WIDENED:  # matrices: tokens 0-7, 8-15, ... of one chunk
        token = tokens + (lane & (16 * TOKEN_BLOCKS - 1))
        from_chunk = 0
    else:  # matrices: tokens 0-7 of the first chunk, of the second; tokens 8-15 of the first, of the second
        token = tokens + (lane & 7) + ((lane >> 4) << 3)
        from_chunk = ((lane >> 3) & 1) * 16
    for i in range(4):
        place = (group * GROUP_BYTES + from_chunk + i * STEP_BYTES) ^ (flip_of_token(token) * 16)
        places[i] = int32(token * KEY_BYTES + place)
    query = smem + QUERIES_AT + (first_row + (lane & 15)) * QUERY_PITCH + group * (STEPS * 32) + (lane >> 4) * 16
    places[4] = int32(query)
    g = lane >> 2
    t = lane & 3
    places[5] = int32(smem + SCORES_AT + (group * ROWS + first_row + g) * SCORE_PITCH + 8 * t)


def partial_scores(keys, words, places):
    """Q K^T over this warp's part of D, rows and tokens, into shared memory. places: see `find_places`."""
    sums = cuda.local.array(SCORE_WORDS, float32)  # [block of tokens, row tile, 8 tokens or the other 8, c0..c3]
    for i in range(SCORE_WORDS):
        sums[i] = float32(0.0)
    for step in range(STEPS):
        at = keys + places[step % 4] + step // 4 * (4 * STEP_BYTES)
        if QUERIES_IN_SHARED:
            for m in range(WARP_ROW_TILES):
                a = ldmatrix_x4(places[4] + m * 16 * QUERY_PITCH + step * 32)
                w = (m * STEPS + step) * 4
                words[w], words[w + 1], words[w + 2], words[w + 3] = a
        for block in range(TOKEN_BLOCKS):
            if WIDENED and TOKEN_BLOCKS == 2:  # both blocks at once
                if block == 0:
                    r0, r1, r2, r3 = ldmatrix_x4(at)
                first = widen_keys(r2 if block else r0)
                second = widen_keys(r3 if block else r1)
            elif WIDENED:
                x, y = ldmatrix_x2(at)
                first = widen_keys(x)
                second = widen_keys(y)
            else:
                r0, r1, r2, r3 = ldmatrix_x4(at + block * 16 * KEY_BYTES)
                first = (r0, r1)
                second = (r2, r3)
            for m in range(WARP_ROW_TILES):
                w = (m * STEPS + step) * 4
                a = (words[w], words[w + 1], words[w + 2], words[w + 3])
                s = (block * WARP_ROW_TILES + m) * 8
                c = mma_scores(a, first, (sums[s], sums[s + 1], sums[s + 2], sums[s + 3]))
                d = mma_scores(a, second, (sums[s + 4], sums[s + 5], sums[s + 6], sums[s + 7]))
                sums[s], sums[s + 1], sums[s + 2], sums[s + 3] = c
                sums[s + 4], sums[s + 5], sums[s + 6], sums[s + 7] = d
    thread = thread_index()
    _, _, tokens = part_of_warp(thread)
    flip = flip_of((thread & 31) >> 2)
    for block in range(TOKEN_BLOCKS):
        place = tokens * 4 + block * 64
        for m in range(WARP_ROW_TILES):
            for half in range(2):
                row = (m * 16 + half * 8) * SCORE_PITCH
                s = (block * WARP_ROW_TILES + m) * 8 + half * 2
                set_shared_f32x2(places[5] + row + (place ^ flip), (sums[s], sums[s + 1]))
                set_shared_f32x2(places[5] + row + ((place + 32) ^ flip), (sums[s + 4], sums[s + 5]))


def whole_scores(smem, stage, scores, bias):
    """The parts of D added up, for this thread's row and tokens; and the tokens' biases."""
    thread = thread_index()
    row = thread >> ROW_LANE_BITS
    place = thread & (ROW_LANES - 1)
    more = cuda.local.array(TOKENS_EACH, float32)
    flip = flip_of(row)
    at = smem + SCORES_AT + row * SCORE_PITCH
    for i in range(0, TOKENS_EACH, SPAN):
        load_span(scores, i, at + ((token_of(place, i) * 4) ^ flip))
    for group in range(1, DIM_GROUPS):
        for i in range(0, TOKENS_EACH, SPAN):
            load_span(more, i, at + group * (ROWS * SCORE_PITCH) + ((token_of(place, i) * 4) ^ flip))
        for i in range(TOKENS_EACH):
            scores[i] = scores[i] + more[i]
    for i in range(0, TOKENS_EACH, SPAN):
        load_span(bias, i, smem + BIAS_AT + (stage * TILE + token_of(place, i)) * 4)


def softmax(weights, scores, bias, first, scale, limit, top, total):
    """Scores to weights for this thread's row: returns (the score whose weight is 1, this thread's share of the sum,
    whether the row's earlier sums must be rescaled).

    That score is not always the highest: while no score is more than 2^HEADROOM times its weight, it stays, so that
    sums are rescaled for few tiles only.

    first: the tile's first token. scale: bmm1 * log2(e). limit: tokens at and past it are not seen by the row.
    """
    thread = thread_index()
    row = thread >> ROW_LANE_BITS
    place = int32(thread & (ROW_LANES - 1))
    seen = int32(limit - first)  # of the tile
    highest = top
    for i in range(TOKENS_EACH):
        z = scores[i] * scale
        z = select(z == NEGATIVE_INFINITY, LOWEST, z)
        z = select(bias[i] == float32(0.0), z, bias[i])
        z = select(int32(token_of(place, i)) < seen, z, NEGATIVE_INFINITY)
        scores[i] = z
        highest = larger(highest, z)
    for i in range(ROW_LANE_BITS):
        highest = larger(highest, shuffle_xor(highest, 1 << i))
    highest = select(highest > top + HEADROOM, highest, top)
    base = select(highest == NEGATIVE_INFINITY, float32(0.0), highest)  # nothing seen yet: 2^(-inf - 0) is 0, not NaN
    decay = exp2(top - base)
    total = total * decay
    for i in range(TOKENS_EACH):
        scores[i] = exp2(scores[i] - base)
        total = total + scores[i]
    for i in range(0, TOKENS_EACH, SPAN):
        to = weights + row * WEIGHT_PITCH + token_of(place, i) * 2
        if SPAN == 4:
            low = pack_weights(scores[i], scores[i + 1])
            set_shared_u32x2(to, (low, pack_weights(scores[i + 2], scores[i + 3])))
        else:
            set_shared_u32(to, pack_weights(scores[i], scores[i + 1]))
    set_shared_f32(weights + DECAY_AT + row * 4, decay, place == 0)
    return highest, total, select(decay == float32(1.0), 0, 1)


def token_of(place, i):
    """The token of a tile that is number i of TOKENS_EACH of a thread: SPAN neighbours, then the next thread's."""
    return (i // SPAN * ROW_LANES + place) * SPAN + i % SPAN


def load_span(numbers, i, address):
    """SPAN neighbouring fp32 numbers out of shared memory."""
    if SPAN == 4:
        numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3] = shared_f32x4(address)
    else:
        numbers[i], numbers[i + 1] = shared_f32x2(address)


def add_values(smem, weights, keys, first, common, rescale, sums):
    """sums = sums * decay + P V over this warp's 64 dims, for tokens before `common`, which every row sees.

    rescale: whether any row's decay is not 1. A token at or past `common` is taken as a row of zeros, even if its
    weight is 0: what it holds may be NaN.
    """
    thread = thread_index()
    lane = thread & 31
    g = lane >> 2
    if rescale:
        for m in range(ROW_TILES):
            upper = shared_f32(weights + DECAY_AT + (m * 16 + g) * 4)
            lower = shared_f32(weights + DECAY_AT + (m * 16 + g + 8) * 4)
            for i in range(8):
                s = (m * 8 + i) * 4
                sums[s] = sums[s] * upper
                sums[s + 1] = sums[s + 1] * upper
                sums[s + 2] = sums[s + 2] * lower
                sums[s + 3] = sums[s + 3] * lower
    words = cuda.local.array(WEIGHT_WORDS, uint32)
    in_common = int32(common - first)
    for part in range(TILE // 16):
        token = part * 16 + (lane & 15)
        values = keys + token * KEY_BYTES + (thread >> 5) * VALUE_BYTES
        at = select(int32(token) < in_common, values, smem + ZEROS_AT) + ((lane >> 4) ^ flip_of_token(token)) * 16
        for m in range(ROW_TILES):
            a = ldmatrix_x4(weights + (m * 16 + (lane & 15)) * WEIGHT_PITCH + part * 32 + (lane >> 4) * 16)
            words[m * 4], words[m * 4 + 1], words[m * 4 + 2], words[m * 4 + 3] = a
        for j in range(VALUE_LOADS):
            r0, r1, r2, r3 = ldmatrix_x4_trans(at ^ (j * 32))
            if EIGHT_BIT:
                # r0: tokens 2t, 2t+1 of dims 2g, 2g+1 as bytes (2t, 2g), (2t, 2g+1), (2t+1, 2g), (2t+1, 2g+1);
                # r1: tokens 8 further; r2, r3: 16 dims further. Sorted by dim, two bytes are a register of B.
                x0 = permute(r0, r0, 0x3120)
                x1 = permute(r1, r1, 0x3120)
                y0 = permute(r2, r2, 0x3120)
                y1 = permute(r3, r3, 0x3120)
                multiply(sums, words, j * 4, (low_e4m3_to_fp16(x0), low_e4m3_to_fp16(x1)))
                multiply(sums, words, j * 4 + 1, (high_e4m3_to_fp16(x0), high_e4m3_to_fp16(x1)))
                multiply(sums, words, j * 4 + 2, (low_e4m3_to_fp16(y0), low_e4m3_to_fp16(y1)))
                multiply(sums, words, j * 4 + 3, (high_e4m3_to_fp16(y0), high_e4m3_to_fp16(y1)))
            else:
                multiply(sums, words, j * 2, (r0, r1))
                multiply(sums, words, j * 2 + 1, (r2, r3))


def multiply(sums, words, column, b):
    """Add 16 tokens of 8 value dims to the sums of every row."""
    for m in range(ROW_TILES):
        s = (m * 8 + column) * 4
        a = (words[m * 4], words[m * 4 + 1], words[m * 4 + 2], words[m * 4 + 3])
        c = mma_values(a, b, (sums[s], sums[s + 1], sums[s + 2], sums[s + 3]))
        sums[s], sums[s + 1], sums[s + 2], sums[s + 3] = c


def place_in_sums(m, half, i):
    """Which two sums are neighbours in the output, and of which dim (of the warp's 64) the first is.

    m: row tile. half: 0 for row g, 1 for row g + 8. i: 0..7.
    """
    t = thread_index() & 3
    if EIGHT_BIT:  # columns came apart into even and odd dims
        s = (m * 8 + (i >> 1) * 2) * 4 + half * 2 + (i & 1)
        return s, s + 4, (i >> 1) * 16 + 4 * t + 2 * (i & 1)
    s = (m * 8 + i) * 4 + half * 2
    return s, s + 1, i * 8 + 2 * t


def add_late_values(smem, weights, keys, first, common, until, seen_by_first, any_at_all, sums):
    """The tokens from `common` to `until`, which only later query tokens see: one by one, and only into their rows.

    seen_by_first: how many keys query token 0 sees; token q sees q more. any_at_all: whether the tile is one.
    """
    thread = thread_index()
    g = (thread & 31) >> 2
    end = select(any_at_all, smaller_int(until, first + TILE), first)
    for index in range(larger_int(common, first), end):
        key = index - first
        at = keys + key * KEY_BYTES + (thread >> 5) * VALUE_BYTES
        flip = flip_of_token(key) * 16
        for m in range(ROW_TILES):
            for half in range(2):
                row = m * 16 + half * 8 + g
                weight = low_weight(shared_u16(weights + row * WEIGHT_PITCH + key * 2))
                seen = index < seen_by_first + shared_i32(smem + TOKENS_AT + row * 4)
                for i in range(8):
                    s, s_next, dim = place_in_sums(m, half, i)
                    x, y = values_of(at, flip, dim)
                    sums[s] = select(seen, sums[s] + weight * x, sums[s])
                    sums[s_next] = select(seen, sums[s_next] + weight * y, sums[s_next])


def values_of(row, flip, dim):
    """Two neighbouring values of a cache row in shared memory, in fp32."""
    if EIGHT_BIT:
        both = low_e4m3_to_fp16(shared_u16(row + (dim ^ flip)))
        return low_fp16(both), high_fp16(both)
    both = shared_u32(row + ((dim * 2) ^ flip))
    return low_number(both), high_number(both)
