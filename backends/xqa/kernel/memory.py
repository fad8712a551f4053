# mypy: ignore-errors
"""From a token to its address: keys into shared memory, queries into registers, results out."""

from mla.backends.xqa.isa import (
    EVICT_FIRST,
    EVICT_NORMAL,
    high_e4m3_to_fp16,
    high_product,
    load_i32,
    load_u8,
    load_u16,
    low_e4m3_to_fp16,
    prefetch,
    quotient,
    set_shared_f32,
    set_shared_u32,
    set_shared_u32x4,
    store_f32,
    store_f32x2,
    store_u16,
    store_u32,
    thread_index_anew,
)
from mla.backends.xqa.isa import cp_async16 as copy16  # or `copy16_by_number`
from mla.backends.xqa.isa import load_u32 as query_word  # or one of those below
from mla.backends.xqa.isa import pack_bf16 as pack_out
from mla.backends.xqa.isa import thread_index_anew as loading_thread  # or `thread_index`, where registers are many
from mla.backends.xqa.kernel.constants import (
    BIAS_AT,
    CHUNKS,
    DIM_GROUP_BITS,
    DIM_GROUPS,
    EIGHT_BIT,
    EIGHT_BIT_QUERY,
    FLIPS,
    GROUP_BYTES,
    KEY_BYTES,
    KEYS_AT,
    LOADER_BITS,
    LOADERS,
    LOADS,
    OUT_BYTES,
    QUERIES_AT,
    QUERIES_IN_SHARED,
    QUERY_PITCH,
    ROW_GROUP_BITS,
    ROW_GROUPS,
    ROW_LANE_BITS,
    ROW_LANES,
    ROWS,
    SPARSE,
    STAGE_BYTES,
    STEP_BYTES,
    STEPS,
    TILE,
    TOKEN_BLOCKS,
    WARP_ROW_TILES,
    WIDENED,
)
from mla.backends.xqa.kernel.numbers import (
    NEGATIVE_INFINITY,
    NOT_A_NUMBER,
    float32,
    int32,
    int64,
    select,
)

# ---- keys ------------------------------------------------------------------------------------------------------------

SHORT_STREAM = 192 << 20
"""Bytes of cache that a launch may read by EVICT_FIRST, which keeps a stream from replacing lines that must be written
back first. On an H200 whose L2 was full of such lines 38 MB took 26.7 µs by it and 29.3 without a policy, 151 MB 57.3
and 59.9; but 297 MB took 94.4 and 92.6, 1208 MB 314 and 301."""


def policy_of_copies(tiles):
    """What L2 is told of the lines that are copied. tiles: all tiles of keys that the launch reads."""
    return select(int64(tiles) * STAGE_BYTES <= SHORT_STREAM, int64(EVICT_FIRST), int64(EVICT_NORMAL))


def page_of(index, pages):
    """(which page a token is on, its place there). pages: (tokens of a page, and 1 / that as a factor and a shift)."""
    page_size, factor, shift = pages
    page = int32(high_product(index << 1, factor) >> shift)
    return page, int32(index - page * page_size)


def table_entry(table, pages, first, limit):
    """What the table says of a tile's token that this thread helps to load: (low half, high half) of a page (dense) or
    of a slot (sparse); (-1, 0) where it says nothing.

    Nothing is computed from the two here: the thread would wait for them, and they are not needed before the next tile.
    table: (address of the request's row, bytes from column to column, wide, columns).
    """
    address, step, wide, columns = table
    index = int32(first + loaded_token(loading_thread()))
    column = index if SPARSE else page_of(index, pages)[0]
    ok = (index < limit) & (column < columns)
    at = address + int64(column) * step
    return load_i32(at, ok, -1), load_i32(at + 4, ok & wide, 0)


def place_of(pool, entry, index, limit):
    """(address of a token's cache row, bytes to read of each chunk: 16 or 0, its bias).

    pool: (address, bytes from page to page, from token to token, what an entry must be below, see `page_of`, see
    `policy_of_copies`). All of the address arithmetic is in 64 bits. A dense token outside the pool cannot be read:
    rows that see it become NaN.
    """
    address, page_step, token_step, entries, pages, _ = pool
    low, high = entry
    inside = (low >= 0) & (low < entries) & (high == 0)
    known = select(inside, low, 0)
    if SPARSE:
        page, offset = page_of(known, pages)
        bias = select(inside, float32(0.0), NEGATIVE_INFINITY)
    else:
        page = known
        _, offset = page_of(index, pages)
        bias = select(index < limit, select(inside, float32(0.0), NOT_A_NUMBER), NEGATIVE_INFINITY)
    source = address + int64(page) * page_step + int64(offset) * token_step
    return source, select(inside, 16, 0), bias


def loaded_token(thread):
    """Which token of a tile a thread helps to load: LOADERS neighbours take the same."""
    return thread >> LOADER_BITS


def flip_of_token(token):
    """What is exclusive-or'ed into the number of each 16-byte chunk of a key in shared memory.

    A key is 9 times FLIPS chunks. So chunk c of eight neighbouring keys lies in eight different groups of four banks,
    which `ldmatrix` wants, and a copy of FLIPS chunks fills whole lines, which `cp.async` wants: padding between keys
    would give it two and a half times the work. Two keys of 8-bit numbers share a line of 128 bytes in the middle.
    """
    if EIGHT_BIT:
        return (token >> 1) & (FLIPS - 1)
    return token & (FLIPS - 1)


def load_tile(smem, stage, first, entry, pool, limit):
    """Start copying TILE cache rows, tokens first, first + 1, ..., into a stage. Rows that are no keys become zeros."""
    thread = loading_thread()
    token = loaded_token(thread)
    part = thread & (LOADERS - 1)
    source, size, bias = place_of(pool, entry, int32(first + token), limit)
    to = int32(smem + KEYS_AT + stage * STAGE_BYTES + token * KEY_BYTES)
    flip = flip_of_token(token)
    source = source + part * 16
    policy = pool[5]
    for i in range(LOADS):
        if LOADERS >= FLIPS:
            chunk = (part ^ flip) + i * LOADERS
        else:
            chunk = (part + i * LOADERS) ^ flip
        copy16(to + chunk * 16, source + i * (LOADERS * 16), size, part + i * LOADERS < CHUNKS, policy)
    set_shared_f32(smem + BIAS_AT + (stage * TILE + token) * 4, bias, part == 0)


def copy16_by_number(to, source, size, active, policy):
    """`cp_async16` for rows that do not begin at multiples of 16 bytes: number by number, at once, by no policy."""
    ok = active & (size > 0)
    words = (word_of(source, ok), word_of(source + 4, ok), word_of(source + 8, ok), word_of(source + 12, ok))
    set_shared_u32x4(to, words, active)


def word_of(address, ok):
    """Four bytes of the cache, at an address that is a multiple of one number's size only."""
    if EIGHT_BIT:
        return word_of_bytes(address, ok)
    return word_of_halves(address, ok)


def word_of_bytes(address, ok):
    low = int32(load_u8(address, ok)) | (int32(load_u8(address + 1, ok)) << 8)
    high = int32(load_u8(address + 2, ok)) | (int32(load_u8(address + 3, ok)) << 8)
    return low | (high << 16)


def word_of_halves(address, ok):
    return int32(load_u16(address, ok)) | (int32(load_u16(address + 2, ok)) << 16)


# ---- queries ---------------------------------------------------------------------------------------------------------


def part_of_warp(thread):
    """What a thread's warp takes of the scores: (which part of D, from which row of the block, from which token of a
    tile)."""
    warp = thread >> 5
    first_row = (warp >> DIM_GROUP_BITS & (ROW_GROUPS - 1)) * (16 * WARP_ROW_TILES)
    return warp & (DIM_GROUPS - 1), first_row, (warp >> (DIM_GROUP_BITS + ROW_GROUP_BITS)) * (16 * TOKEN_BLOCKS)


def load_queries(smem, words, query, tile, rows, heads):
    """A block's query vectors as A fragments, in registers, words[(row tile, step, a0 a1 a2 a3)], or in shared memory.

    Warp w loads the rows, and of D the part, that it multiplies. A row is token * H + head. query: (address of the
    request, bytes from token to token, from head to head).

    A step of 16-bit keys that were widened from a 16-byte chunk takes dims 4t..4t+3 from lane t as k = 2t, 2t+1 and
    2t+8, 2t+9: the order of the products does not matter as long as A and B agree.
    """
    address, token_step, head_step = query
    thread = thread_index_anew()
    g = (thread & 31) >> 2
    t = thread & 3
    group, first_row, _ = part_of_warp(thread)
    share = group * GROUP_BYTES
    for m in range(WARP_ROW_TILES):
        for half in range(2):
            row = tile * ROWS + first_row + m * 16 + half * 8 + g
            token = quotient(row, heads)
            head = row - token * heads
            ok = row < rows
            at = address + int64(token) * token_step + int64(head) * head_step
            for step in range(STEPS):
                if WIDENED and EIGHT_BIT_QUERY:
                    four = query_word(at + share + step * STEP_BYTES + t * 4, ok)
                    low = low_e4m3_to_fp16(four)
                    high = high_e4m3_to_fp16(four)
                elif WIDENED:
                    place = at + 2 * (share + step * STEP_BYTES + t * 4)
                    low = query_word(place, ok)
                    high = query_word(place + 4, ok)
                else:
                    place = at + share + step * STEP_BYTES + t * 4
                    low = query_word(place, ok)
                    high = query_word(place + 16, ok)
                words[(m * STEPS + step) * 4 + half] = low
                words[(m * STEPS + step) * 4 + half + 2] = high
        if QUERIES_IN_SHARED:
            at = smem + QUERIES_AT + (first_row + m * 16 + g) * QUERY_PITCH + group * (STEPS * 32) + t * 4
            for step in range(STEPS):
                w = (m * STEPS + step) * 4
                set_shared_u32(at + step * 32, words[w])
                set_shared_u32(at + step * 32 + 8 * QUERY_PITCH, words[w + 1])
                set_shared_u32(at + step * 32 + 16, words[w + 2])
                set_shared_u32(at + step * 32 + 16 + 8 * QUERY_PITCH, words[w + 3])


# ---- what will be needed, before it is known where -------------------------------------------------------------------

AHEAD_OF_NEED = 64  # bytes that one prefetch brings at least


def prefetch_table(row, step, columns):
    """Into L2: the first THREADS * 64 bytes of a request's row of the table. step: bytes from column to column."""
    at = int64(thread_index_anew()) * AHEAD_OF_NEED
    prefetch(row + at, (columns > 0) & (at < int64(columns - 1) * step + 4))


def prefetch_queries(query, tile, rows, heads):
    """Into L2: a block's query vectors. query: as in `load_queries`. ROW_LANES threads take one row."""
    address, token_step, head_step = query
    thread = thread_index_anew()
    row = tile * ROWS + (thread >> ROW_LANE_BITS)
    token = quotient(row, heads)
    head = row - token * heads
    at = address + int64(token) * token_step + int64(head) * head_step
    pieces = 9 if EIGHT_BIT_QUERY else 18
    for i in range((18 + ROW_LANES - 1) // ROW_LANES):
        piece = (thread & (ROW_LANES - 1)) + i * ROW_LANES
        prefetch(at + piece * AHEAD_OF_NEED, (row < rows) & (piece < pieces))


# ---- results ---------------------------------------------------------------------------------------------------------


def store_pair(address, x, y, ok):
    """Two neighbouring numbers of the output, in its format."""
    if OUT_BYTES == 4:
        store_f32x2(address, (x, y), ok)
    else:
        store_u32(address, pack_out(x, y), ok)


def store_pair_apart(address, x, y, ok):
    """The same where only one number's alignment is certain."""
    if OUT_BYTES == 4:
        store_f32(address, x, ok)
        store_f32(address + 4, y, ok)
    else:
        both = pack_out(x, y)
        store_u16(address, both, ok)
        store_u16(address + 2, both >> 16, ok)


store_out = store_pair  # or `store_pair_apart`
