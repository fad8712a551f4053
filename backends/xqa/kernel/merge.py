# mypy: ignore-errors
"""The kernel that joins the parts of a request that several teams shared. It leaves no state behind.

It finds from `begins`, which the decode kernel wrote, which teams took a request's keys (in deterministic mode the
pieces are where they always are). A request that one team took alone was written by that team, and is left alone here.
"""

from mla.backends.xqa.isa import (
    barrier,
    block_index,
    exp2,
    larger,
    load_f32,
    load_fresh_f32,
    load_fresh_f32x4,
    load_fresh_i32,
    quotient,
    set_shared_f32,
    set_shared_f32x4,
    shared_base,
    shared_f32,
    shared_f32x4,
    shuffle_xor,
    store_f32,
    thread_index,
    wait_for_last_grid,
)
from mla.backends.xqa.kernel.constants import (
    DEPENDENT,
    MERGE_THREADS,
    OUT_BYTES,
    PART_BYTES,
    ROWS,
    SPARSE,
    TILE,
    TILE_BITS,
)
from mla.backends.xqa.kernel.decode import finished
from mla.backends.xqa.kernel.memory import store_out
from mla.backends.xqa.kernel.numbers import (
    LOG2_E,
    NEGATIVE_INFINITY,
    float32,
    int64,
    select,
    smaller_int,
)
from mla.backends.xqa.kernel.schedule import team_of, visible_tokens

SUMS_BYTES = 16 * MERGE_THREADS
AT_ONCE = 4  # loads that a thread has under way


def merge(
    lengths,
    length_step,
    length_wide,
    room,
    out,
    out_request,
    out_token,
    out_head,
    lse,
    lse_request,
    lse_token,
    lse_head,
    lse_unit,
    sinks,
    bmm2,
    bmm2_at,
    parts,
    part_lse,
    begins,
    requests,
    q_len,
    heads,
    tiles,
    overhead,
    piece,
    pieces,
    rows_per_block,
    slices,
):
    """Join one request's parts for `rows_per_block` rows. Grid: requests * blocks per request * slices.

    A block joins one of `slices` parts of a row's 512 dims, four for each thread; where threads are left over, groups
    of them take parts of the request in turn.

    Dynamic shared memory: four fp32 for each thread, and one for each part that there can be.
    """
    thread = thread_index()
    smem = shared_base()
    rows = heads if SPARSE else q_len * heads
    blocks = quotient(rows + rows_per_block - 1, rows_per_block)
    block = quotient(block_index(), slices)
    dims_of_four = quotient(PART_BYTES // 16, slices)
    group = quotient(thread, dims_of_four)
    four = (block_index() - block * slices) * dims_of_four + thread - group * dims_of_four  # of the row's 128
    groups = quotient(MERGE_THREADS, dims_of_four)
    request = quotient(block, blocks)
    first_row = (block - request * blocks) * rows_per_block
    _, keys = visible_tokens((lengths, length_step, length_wide, q_len, room), request, 1)
    count = (keys + (TILE - 1)) >> TILE_BITS
    out_scale = load_f32(bmm2_at, bmm2_at != 0, bmm2)
    if DEPENDENT:
        wait_for_last_grid()
    if piece > 0:
        count_of_parts = quotient(count + (piece - 1), piece)
        slots = (int64(request) * pieces, 1, 0)
    else:
        share = load_fresh_i32(begins + int64(requests) * 4)
        first = load_fresh_i32(begins + int64(request) * 4) + overhead
        head_team = team_of(first, share)
        count_of_parts = team_of(first + smaller_int(count, 1) * (count - 1), share) - head_team + 1
        slots = (int64(head_team) * 2, 2, 1)
    if count_of_parts > 1:
        owner = quotient(request, q_len) if SPARSE else request
        token0 = request - owner * q_len if SPARSE else 0
        for row in range(first_row, smaller_int(first_row + rows_per_block, rows)):
            token = quotient(row, heads)
            head = row - token * heads
            top, weight = weigh_parts(smem, part_lse + row * 4, slots, count_of_parts, tiles)
            sink = load_f32(sinks + head * 4, sinks != 0, NEGATIVE_INFINITY) * LOG2_E
            factor, row_lse = finished(top, weight, sink, out_scale)
            to = lse + int64(owner) * lse_request + int64(token0 + token) * lse_token + int64(head) * lse_head
            store_f32(to, row_lse * lse_unit, (four == 0) & (group == 0) & (lse != 0))
            from_here = parts + int64(row) * PART_BYTES + four * 16
            sums = add_parts(smem, from_here, slots, count_of_parts, tiles, group, groups)
            w, x, y, z = add_groups(smem, sums, dims_of_four, groups)
            at = out + int64(owner) * out_request + int64(token0 + token) * out_token + int64(head) * out_head
            at = at + four * (4 * OUT_BYTES)
            store_out(at, w * factor, x * factor, group == 0)
            store_out(at + 2 * OUT_BYTES, y * factor, z * factor, group == 0)
            barrier()  # the weights and the groups' sums have been read


def first_row_of(slots, i, tiles):
    """The row of scratch at which part i begins. slots: (the first, from one to the next, how much further the first
    part lies): a head is in its team's second slot, later parts are in the first."""
    base, step, of_head = slots
    return (base + i * step + select(i == 0, of_head, 0)) * tiles * ROWS


def weigh_parts(smem, part_lse, slots, count, tiles):
    """(the highest log-sum-exp, the sum of 2^(lse - highest)) of a row's parts; the summands into shared memory."""
    thread = thread_index()
    lane = thread & 31
    top = NEGATIVE_INFINITY
    for start in range(0, count, 32):  # every warp looks at all parts: no barrier is needed
        i = start + lane
        at = part_lse + first_row_of(slots, i, tiles) * 4
        top = larger(top, load_fresh_f32(at, i < count, NEGATIVE_INFINITY))
    for i in range(5):
        top = larger(top, shuffle_xor(top, 1 << i))
    base = select(top == NEGATIVE_INFINITY, float32(0.0), top)
    weight = float32(0.0)
    for start in range(0, count, 32):
        i = start + lane
        at = part_lse + first_row_of(slots, i, tiles) * 4
        share = exp2(load_fresh_f32(at, i < count, NEGATIVE_INFINITY) - base)
        weight = weight + share
        set_shared_f32(smem + SUMS_BYTES + i * 4, share, (i < count) & (thread < 32))
    for i in range(5):
        weight = weight + shuffle_xor(weight, 1 << i)
    barrier()
    return top, weight


def add_parts(smem, parts, slots, count, tiles, group, groups):
    """Four dims of a row: the sum of the parts that this thread's group takes, each times its weight."""
    w = float32(0.0)
    x = float32(0.0)
    y = float32(0.0)
    z = float32(0.0)
    for start in range(0, count, groups * AT_ONCE):
        for j in range(AT_ONCE):
            i = start + j * groups + group
            there = i < count
            share = shared_f32(smem + SUMS_BYTES + select(there, i, 0) * 4)
            dims = load_fresh_f32x4(parts + first_row_of(slots, i, tiles) * PART_BYTES, there)
            w = w + share * dims[0]
            x = x + share * dims[1]
            y = y + share * dims[2]
            z = z + share * dims[3]
    return w, x, y, z


def add_groups(smem, sums, dims_of_four, groups):
    """The sums of all groups, in the order of the groups; only the first group's threads need them."""
    thread = thread_index()
    set_shared_f32x4(smem + thread * 16, sums)
    barrier()
    w, x, y, z = sums
    for group in range(1, groups):
        other = smaller_int(thread + group * dims_of_four, MERGE_THREADS - 1)
        more = shared_f32x4(smem + other * 16)
        w = w + more[0]
        x = x + more[1]
        y = y + more[2]
        z = z + more[3]
    return w, x, y, z
