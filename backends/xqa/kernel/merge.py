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
    int32,
    int64,
    larger_int,
    select,
    smaller_int,
)
from mla.backends.xqa.kernel.schedule import team_of, visible_tokens

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
    threads,
    slices,
):
    """Join one request's parts for `rows_per_block` rows. Grid: requests * blocks per request * slices.

    A block of `threads` joins one of `slices` parts of a row's 512 dims, four for each thread; where threads are left
    over, groups of them take parts of the request in turn.

    Dynamic shared memory: four fp32 for each thread, and one for each part that there can be.
    """
    thread = thread_index()
    smem = shared_base()
    rows = int32(heads if SPARSE else q_len * heads)
    blocks = int32(quotient(rows + rows_per_block - 1, rows_per_block))
    block = int32(quotient(block_index(), slices))
    dims_of_four = int32(quotient(PART_BYTES // 16, slices))
    group = int32(quotient(thread, dims_of_four))
    slice_at = (block_index() - block * slices) * dims_of_four
    four = int32(slice_at + thread - group * dims_of_four)  # of the row's 128
    groups = int32(quotient(threads, dims_of_four))
    request = int32(quotient(block, blocks))
    first_row = int32((block - request * blocks) * rows_per_block)
    _, keys = visible_tokens((lengths, length_step, length_wide, q_len, room), request, 1)
    count = int32((keys + (TILE - 1)) >> TILE_BITS)
    out_scale = load_f32(bmm2_at, bmm2_at != 0, bmm2)
    if DEPENDENT:
        wait_for_last_grid()
    step = int64(tiles * ROWS)  # from one slot's rows to the next's
    if piece > 0:
        count_of_parts = int32(quotient(count + (int32(piece) - 1), int32(piece)))
        first_slot = int64(request) * pieces * step
        of_head = int64(0)
    else:
        share = load_fresh_i32(begins + int64(requests) * 4)
        first = load_fresh_i32(begins + int64(request) * 4) + overhead
        head_team = team_of(first, share)
        count_of_parts = int32(team_of(first + larger_int(count - 1, 0), share) - head_team + 1)
        first_slot = int64(head_team) * 2 * step
        of_head = step
        step = step * 2
    slots = (first_slot, step, of_head)
    if count_of_parts > 1:
        owner = quotient(request, q_len) if SPARSE else request
        token0 = request - owner * q_len if SPARSE else 0
        row = first_row
        end = int32(smaller_int(first_row + rows_per_block, rows))
        while row < end:
            token = quotient(row, heads)
            head = row - token * heads
            logs = int32(smem + threads * 16)
            top, weight = weigh_parts(logs, part_lse + int64(row) * 4, slots, count_of_parts, threads)
            sink = load_f32(sinks + int64(head) * 4, sinks != 0, NEGATIVE_INFINITY) * LOG2_E
            factor, row_lse = finished(top, weight, sink, out_scale)
            to = lse + int64(owner) * lse_request + int64(token0 + token) * lse_token + int64(head) * lse_head
            store_f32(to, row_lse * lse_unit, (four == 0) & (group == 0) & (lse != 0))
            from_here = parts + int64(row) * PART_BYTES + int64(four) * 16
            sums = add_parts(logs, top, from_here, slots, count_of_parts, group, groups)
            w, x, y, z = add_groups(smem, sums, dims_of_four, groups, threads)
            at = out + int64(owner) * out_request + int64(token0 + token) * out_token + int64(head) * out_head
            at = at + int64(four) * (4 * OUT_BYTES)
            store_out(at, w * factor, x * factor, group == 0)
            store_out(at + 2 * OUT_BYTES, y * factor, z * factor, group == 0)
            row = int32(row + 1)
            if row < end:
                barrier()  # the logarithms and the groups' sums have been read


def row_of(slots, i):
    """The row of scratch at which part i begins. slots: (that of the first slot, from slot to slot, how much further
    the first part lies): a head is in its team's second slot, later parts are in the first."""
    first_slot, step, of_head = slots
    return first_slot + int64(i) * step + select(i == 0, of_head, int64(0))


def base_of(top):
    """What is subtracted from a log-sum-exp: where nothing has weight, minus infinity minus 0 is no NaN."""
    return select(top == NEGATIVE_INFINITY, float32(0.0), top)


def weigh_parts(logs, part_lse, slots, count, threads):
    """(the highest log-sum-exp, the sum of 2^(lse - highest)) of a row's parts; log-sum-exps into shared memory."""
    thread = thread_index()
    start = int32(0)
    while start < count:  # (a `range` counts in 64 bits, and divides where its step is no constant)
        i = int32(start + thread)
        at = part_lse + row_of(slots, i) * 4
        set_shared_f32(logs + i * 4, load_fresh_f32(at, i < count, NEGATIVE_INFINITY), i < count)
        start = int32(start + threads)
    barrier()
    lane = thread & 31
    top = NEGATIVE_INFINITY
    start = int32(0)
    while start < count:  # every warp looks at all parts
        i = int32(smaller_int(start + lane, count - 1))
        top = larger(top, shared_f32(logs + i * 4))
        start = int32(start + 32)
    for i in range(5):
        top = larger(top, shuffle_xor(top, 1 << i))
    base = base_of(top)
    weight = float32(0.0)
    start = int32(0)
    while start < count:
        i = int32(start + lane)
        log = shared_f32(logs + int32(smaller_int(i, count - 1)) * 4)
        weight = weight + select(i < count, exp2(log - base), float32(0.0))
        start = int32(start + 32)
    for i in range(5):
        weight = weight + shuffle_xor(weight, 1 << i)
    return top, weight


def add_parts(logs, top, parts, slots, count, group, groups):
    """Four dims of a row: the sum of the parts that this thread's group takes, each times its weight."""
    base = base_of(top)
    w = float32(0.0)
    x = float32(0.0)
    y = float32(0.0)
    z = float32(0.0)
    start = int32(0)
    while start < count:
        for j in range(AT_ONCE):
            i = int32(start + j * groups + group)
            there = i < count
            dims = load_fresh_f32x4(parts + row_of(slots, i) * PART_BYTES, there)
            log = shared_f32(logs + select(there, i, int32(0)) * 4)
            share = select(there, exp2(log - base), float32(0.0))
            w = w + share * dims[0]
            x = x + share * dims[1]
            y = y + share * dims[2]
            z = z + share * dims[3]
        start = int32(start + groups * AT_ONCE)
    return w, x, y, z


def add_groups(smem, sums, dims_of_four, groups, threads):
    """The sums of all groups, in the order of the groups; only the first group's threads need them."""
    w, x, y, z = sums
    if groups > 1:
        thread = thread_index()
        at = int32(smem + thread * 16)
        set_shared_f32x4(at, sums)
        barrier()
        last = int32(smem + (threads - 1) * 16)
        group = int32(1)
        while group < groups:
            for _ in range(AT_ONCE):
                at = int32(at + dims_of_four * 16)
                more = shared_f32x4(smaller_int(at, last))
                w = w + select(group < groups, more[0], float32(0.0))
                x = x + select(group < groups, more[1], float32(0.0))
                y = y + select(group < groups, more[2], float32(0.0))
                z = z + select(group < groups, more[3], float32(0.0))
                group = int32(group + 1)
    return w, x, y, z
