# mypy: ignore-errors
"""One tile of keys: scores, softmax, values. Every thread of the block takes part in each of the three steps.

Letters: g = lane // 4, t = lane % 4. A fragment and a lane's place in it: see `isa.py`.

Eight warps split the work differently in each step, and meet in shared memory:

    scores    warp w: all rows x 16 tokens x one part of D.  Queries stay in registers; a key is read once per block.
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
    DIM_GROUP_BITS,
    DIM_GROUPS,
    EIGHT_BIT,
    GROUP_BYTES,
    PITCH,
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
    TOKENS_AT,
    TOKENS_EACH,
    VALUE_BYTES,
    VALUE_LOADS,
    WEIGHT_PITCH,
    WEIGHT_WORDS,
    WEIGHTS_AT,
    WIDENED,
    ZEROS_AT,
)
from mla.backends.xqa.kernel.numbers import (
    NEGATIVE_INFINITY,
    cuda,
    float32,
    high_number,
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


def partial_scores(smem, keys, words):
    """Q K^T over this warp's part of D, for all rows [ROWS] and 16 tokens, into shared memory."""
    thread = thread_index()
    lane = thread & 31
    g = lane >> 2
    t = lane & 3
    group = (thread >> 5) & (DIM_GROUPS - 1)
    tokens = (thread >> 5 >> DIM_GROUP_BITS) * 16
    sums = cuda.local.array(SCORE_WORDS, float32)  # [row tile, 8 tokens or the other 8, c0..c3]
    for i in range(SCORE_WORDS):
        sums[i] = float32(0.0)
    if WIDENED:  # matrices: tokens 0-7, tokens 8-15 of one chunk
        at = keys + (tokens + (lane & 15)) * PITCH + group * GROUP_BYTES
    else:  # matrices: tokens 0-7 of the first chunk, of the second; tokens 8-15 of the first, of the second
        at = keys + (tokens + (lane & 7) + ((lane >> 4) << 3)) * PITCH + group * GROUP_BYTES + ((lane >> 3) & 1) * 16
    for step in range(STEPS):
        if WIDENED:
            x, y = ldmatrix_x2(at + step * STEP_BYTES)
            first = widen_keys(x)
            second = widen_keys(y)
        else:
            r0, r1, r2, r3 = ldmatrix_x4(at + step * STEP_BYTES)
            first = (r0, r1)
            second = (r2, r3)
        for m in range(ROW_TILES):
            w = (m * STEPS + step) * 4
            a = (words[w], words[w + 1], words[w + 2], words[w + 3])
            s = m * 8
            c = mma_scores(a, first, (sums[s], sums[s + 1], sums[s + 2], sums[s + 3]))
            d = mma_scores(a, second, (sums[s + 4], sums[s + 5], sums[s + 6], sums[s + 7]))
            sums[s], sums[s + 1], sums[s + 2], sums[s + 3] = c
            sums[s + 4], sums[s + 5], sums[s + 6], sums[s + 7] = d
    for m in range(ROW_TILES):
        for half in range(2):
            row = group * ROWS + m * 16 + half * 8 + g
            to = smem + SCORES_AT + row * SCORE_PITCH + (tokens + 2 * t) * 4
            s = m * 8 + half * 2
            set_shared_f32x2(to, (sums[s], sums[s + 1]))
            set_shared_f32x2(to + 32, (sums[s + 4], sums[s + 5]))


def softmax(smem, stage, first, scale, limit, top, total):
    """Scores to weights for this thread's row: returns (highest score so far, this thread's share of the sum).

    first: the tile's first token. scale: bmm1 * log2(e). limit: tokens at and past it are not seen by the row.
    """
    thread = thread_index()
    row = thread >> ROW_LANE_BITS
    place = thread & (ROW_LANES - 1)
    scores = cuda.local.array(TOKENS_EACH, float32)
    more = cuda.local.array(TOKENS_EACH, float32)
    for i in range(0, TOKENS_EACH, SPAN):
        load_span(scores, i, smem + SCORES_AT + row * SCORE_PITCH + token_of(place, i) * 4)
    for group in range(1, DIM_GROUPS):
        for i in range(0, TOKENS_EACH, SPAN):
            load_span(more, i, smem + SCORES_AT + (group * ROWS + row) * SCORE_PITCH + token_of(place, i) * 4)
        for i in range(TOKENS_EACH):
            scores[i] = scores[i] + more[i]
    for i in range(0, TOKENS_EACH, SPAN):
        load_span(more, i, smem + BIAS_AT + (stage * TILE + token_of(place, i)) * 4)
    highest = top
    for i in range(TOKENS_EACH):
        z = select(more[i] == float32(0.0), scores[i] * scale, more[i])
        z = select(first + token_of(place, i) < limit, z, NEGATIVE_INFINITY)
        scores[i] = z
        highest = larger(highest, z)
    for i in range(ROW_LANE_BITS):
        highest = larger(highest, shuffle_xor(highest, 1 << i))
    base = select(highest == NEGATIVE_INFINITY, float32(0.0), highest)  # nothing seen yet: 2^(-inf - 0) is 0, not NaN
    decay = exp2(top - base)
    total = total * decay
    for i in range(TOKENS_EACH):
        scores[i] = exp2(scores[i] - base)
        total = total + scores[i]
    for i in range(0, TOKENS_EACH, SPAN):
        to = smem + WEIGHTS_AT + row * WEIGHT_PITCH + token_of(place, i) * 2
        if SPAN == 4:
            low = pack_weights(scores[i], scores[i + 1])
            set_shared_u32x2(to, (low, pack_weights(scores[i + 2], scores[i + 3])))
        else:
            set_shared_u32(to, pack_weights(scores[i], scores[i + 1]))
    set_shared_f32(smem + DECAY_AT + row * 4, decay, place == 0)
    return highest, total


def token_of(place, i):
    """The token of a tile that is number i of TOKENS_EACH of a thread: SPAN neighbours, then the next thread's."""
    return (i // SPAN * ROW_LANES + place) * SPAN + i % SPAN


def load_span(numbers, i, address):
    """SPAN neighbouring fp32 numbers out of shared memory."""
    if SPAN == 4:
        numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3] = shared_f32x4(address)
    else:
        numbers[i], numbers[i + 1] = shared_f32x2(address)


def add_values(smem, keys, first, common, sums):
    """sums = sums * decay + P V over this warp's 64 dims, for tokens before `common`, which every row sees.

    A token at or past `common` is taken as a row of zeros, even if its weight is 0: what it holds may be NaN.
    """
    thread = thread_index()
    lane = thread & 31
    g = lane >> 2
    for m in range(ROW_TILES):
        upper = shared_f32(smem + DECAY_AT + (m * 16 + g) * 4)
        lower = shared_f32(smem + DECAY_AT + (m * 16 + g + 8) * 4)
        for i in range(8):
            s = (m * 8 + i) * 4
            sums[s] = sums[s] * upper
            sums[s + 1] = sums[s + 1] * upper
            sums[s + 2] = sums[s + 2] * lower
            sums[s + 3] = sums[s + 3] * lower
    weights = cuda.local.array(WEIGHT_WORDS, uint32)
    for part in range(TILE // 16):
        token = part * 16 + (lane & 15)
        row = select(first + token < common, keys + token * PITCH, smem + ZEROS_AT)
        at = row + (thread >> 5) * VALUE_BYTES + (lane >> 4) * 16
        for m in range(ROW_TILES):
            a = ldmatrix_x4(smem + WEIGHTS_AT + (m * 16 + (lane & 15)) * WEIGHT_PITCH + part * 32 + (lane >> 4) * 16)
            weights[m * 4], weights[m * 4 + 1], weights[m * 4 + 2], weights[m * 4 + 3] = a
        for j in range(VALUE_LOADS):
            r0, r1, r2, r3 = ldmatrix_x4_trans(at + j * 32)
            if EIGHT_BIT:
                # r0: tokens 2t, 2t+1 of dims 2g, 2g+1 as bytes (2t, 2g), (2t, 2g+1), (2t+1, 2g), (2t+1, 2g+1);
                # r1: tokens 8 further; r2, r3: 16 dims further. Sorted by dim, two bytes are a register of B.
                x0 = permute(r0, r0, 0x3120)
                x1 = permute(r1, r1, 0x3120)
                y0 = permute(r2, r2, 0x3120)
                y1 = permute(r3, r3, 0x3120)
                multiply(sums, weights, j * 4, (low_e4m3_to_fp16(x0), low_e4m3_to_fp16(x1)))
                multiply(sums, weights, j * 4 + 1, (high_e4m3_to_fp16(x0), high_e4m3_to_fp16(x1)))
                multiply(sums, weights, j * 4 + 2, (low_e4m3_to_fp16(y0), low_e4m3_to_fp16(y1)))
                multiply(sums, weights, j * 4 + 3, (high_e4m3_to_fp16(y0), high_e4m3_to_fp16(y1)))
            else:
                multiply(sums, weights, j * 2, (r0, r1))
                multiply(sums, weights, j * 2 + 1, (r2, r3))


def multiply(sums, weights, column, b):
    """Add 16 tokens of 8 value dims to the sums of every row."""
    for m in range(ROW_TILES):
        s = (m * 8 + column) * 4
        a = (weights[m * 4], weights[m * 4 + 1], weights[m * 4 + 2], weights[m * 4 + 3])
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


def add_late_values(smem, keys, first, common, until, seen_by_first, sums):
    """The tokens from `common` to `until`, which only later query tokens see: one by one, and only into their rows.

    seen_by_first: how many keys query token 0 sees; token q sees q more.
    """
    thread = thread_index()
    g = (thread & 31) >> 2
    for index in range(larger_int(common, first), smaller_int(until, first + TILE)):
        key = index - first
        at = keys + key * PITCH + (thread >> 5) * VALUE_BYTES
        for m in range(ROW_TILES):
            for half in range(2):
                row = m * 16 + half * 8 + g
                weight = low_weight(shared_u16(smem + WEIGHTS_AT + row * WEIGHT_PITCH + key * 2))
                seen = index < seen_by_first + shared_i32(smem + TOKENS_AT + row * 4)
                for i in range(8):
                    s, s_next, dim = place_in_sums(m, half, i)
                    x, y = values_of(at, dim)
                    sums[s] = select(seen, sums[s] + weight * x, sums[s])
                    sums[s_next] = select(seen, sums[s_next] + weight * y, sums[s_next])


def values_of(row, dim):
    """Two neighbouring values of a cache row in shared memory, in fp32."""
    if EIGHT_BIT:
        both = low_e4m3_to_fp16(shared_u16(row + dim))
        return low_fp16(both), high_fp16(both)
    both = shared_u32(row + dim * 2)
    return low_number(both), high_number(both)
