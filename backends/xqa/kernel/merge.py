# mypy: ignore-errors
"""The kernel that joins the parts of a request that several teams shared. It leaves no state behind.

It finds from the lengths, as the decode kernel did, which teams took a request's keys (in deterministic mode the pieces
are where they always are); where there are many requests it reads them in `begins`, which the decode kernel wrote. A
request that one team took alone was written by that team, and is left alone here.

It may start while the decode kernel runs, and does then what needs nothing of it: whatever stands before
`wait_for_last_grid` reads inputs of the call alone. They are complete, for the decode kernel starts when all kernels
before it have ended, and this one when all blocks of the decode kernel have started. Behind it, all that a row needs of
scratch is asked for at once.
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
    store_f32,
    thread_index,
    wait_for_last_grid,
    warp_max,
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
    cuda,
    float32,
    int32,
    int64,
    larger_int,
    select,
    smaller_int,
)
from mla.backends.xqa.kernel.schedule import MEASURED, begin_and_total, share_of, team_of, visible_tokens

AT_ONCE = 4  # loads that a thread has under way
DIMS_AT_ONCE = 4 * AT_ONCE


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
    teams,
    one_each,
    tiles,
    overhead,
    at_least,
    piece,
    pieces,
    rows_per_block,
    threads,
    slices,
):
    """Join one request's parts for `rows_per_block` rows. Grid: requests * blocks per request * slices.

    A block of `threads` joins one of `slices` parts of a row's 512 dims, four for each thread; where threads are left
    over, groups of them take parts of the request in turn.

    Dynamic shared memory: five fp32 for each thread, and one for each part that there can be.
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
    measure = (lengths, length_step, length_wide, q_len, room)
    _, keys = visible_tokens(measure, request, 1)
    count = int32((keys + (TILE - 1)) >> TILE_BITS)
    out_scale = load_f32(bmm2_at, bmm2_at != 0, bmm2)
    step = int64(tiles * ROWS)  # from one slot's rows to the next's
    if piece > 0:
        count_of_parts = int32(quotient(count + (int32(piece) - 1), int32(piece)))
        first_slot = int64(request) * pieces * step
        of_head = int64(0)
    else:
        if requests <= 32 * MEASURED:
            begin, total = begin_and_total(measure, requests, overhead, request)
            share = share_of(total, teams, one_each, at_least)
        else:
            if DEPENDENT:
                wait_for_last_grid()
            share = load_fresh_i32(begins + int64(requests) * 4)
            begin = load_fresh_i32(begins + int64(request) * 4)
        first = int32(begin + overhead)
        head_team = team_of(first, share)
        count_of_parts = int32(team_of(first + larger_int(count - 1, 0), share) - head_team + 1)
        first_slot = int64(head_team) * 2 * step
        of_head = step
        step = step * 2
    slots = (first_slot, step, of_head)
    if count_of_parts > 1:
        row = first_row
        token = int32(quotient(row, heads))
        head = int32(row - token * heads)
        log_at = part_lse + (row_of(slots, thread) + int64(row)) * 4
        part_at = parts + (row_of(slots, group) + int64(row)) * PART_BYTES + int64(four) * 16
        hop = int64(groups) * step * PART_BYTES  # from a thread's part to its next, but for the head
        next_at = part_at + hop - select(group == 0, of_head, int64(0)) * PART_BYTES
        logs = int32(smem + threads * 20)
        dims = cuda.local.array(DIMS_AT_ONCE, float32)
        owner = int64(quotient(request, q_len) if SPARSE else request)
        token0 = int64(request - owner * q_len if SPARSE else 0)
        out = out + owner * out_request + token0 * out_token + int64(four) * (4 * OUT_BYTES)
        lse_here = lse + owner * lse_request + token0 * lse_token
        end = int32(smaller_int(first_row + rows_per_block, rows))
        if DEPENDENT:
            wait_for_last_grid()
        while row < end:
            log = load_fresh_f32(log_at, thread < count_of_parts, NEGATIVE_INFINITY)
            load_parts(part_at, next_at, hop, group, groups, count_of_parts, dims)
            sink = load_f32(sinks + int64(head) * 4, sinks != 0, NEGATIVE_INFINITY) * LOG2_E
            top = highest_of_parts(logs, log, part_lse + int64(row) * 4, slots, count_of_parts, threads)
            sums = add_parts(logs, top, next_at, hop, group, groups, count_of_parts, dims)
            w, x, y, z, weight = add_groups(smem, sums, dims_of_four, group, groups, threads)
            factor, row_lse = finished(top, weight, sink, out_scale)
            to = lse_here + int64(token) * lse_token + int64(head) * lse_head
            store_f32(to, row_lse * lse_unit, (four == 0) & (group == 0) & (lse != 0))
            at = out + int64(token) * out_token + int64(head) * out_head
            store_out(at, w * factor, x * factor, group == 0)
            store_out(at + 2 * OUT_BYTES, y * factor, z * factor, group == 0)
            row = int32(row + 1)
            head = int32(head + 1)
            token = int32(select(head == heads, token + 1, token))
            head = int32(select(head == heads, 0, head))
            log_at = log_at + 4
            part_at = part_at + PART_BYTES
            next_at = next_at + PART_BYTES
            if row < end:
                barrier()  # the logarithms and the groups' sums have been read
    elif DEPENDENT:
        wait_for_last_grid()  # whoever waits for this kernel relies on the one before it


def row_of(slots, i):
    """The row of scratch at which part i begins. slots: (that of the first slot, from slot to slot, how much further
    the first part lies): a head is in its team's second slot, later parts are in the first."""
    first_slot, step, of_head = slots
    return first_slot + int64(i) * step + select(i == 0, of_head, int64(0))


def base_of(top):
    """What is subtracted from a log-sum-exp: where nothing has weight, minus infinity minus 0 is no NaN."""
    return select(top == NEGATIVE_INFINITY, float32(0.0), top)


def highest_of_parts(logs, log, part_lse, slots, count, threads):
    """The highest log-sum-exp of a row's parts; all of them into shared memory. log: that of the part with this
    thread's number."""
    thread = thread_index()
    set_shared_f32(logs + thread * 4, log, thread < count)
    start = int32(threads)
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
        for j in range(AT_ONCE):
            i = int32(smaller_int(start + j * 32 + lane, count - 1))
            top = larger(top, shared_f32(logs + i * 4))
        start = int32(start + AT_ONCE * 32)
    return warp_max(top)


def load_parts(first_at, next_at, hop, first, groups, count, dims):
    """Start reading four dims of the parts first, first + groups, ... into dims[AT_ONCE, 4]: at first_at, next_at, and
    from there on in hops. Zeros past the last part."""
    for j in range(AT_ONCE):
        at = first_at if j == 0 else next_at + (j - 1) * hop
        four = load_fresh_f32x4(at, first + j * groups < count)
        dims[4 * j], dims[4 * j + 1], dims[4 * j + 2], dims[4 * j + 3] = four


def add_parts(logs, top, next_at, hop, group, groups, count, dims):
    """Four dims of a row, and a weight: the sums over the parts that this thread's group takes, each part times 2 to
    its log-sum-exp less the highest. dims: of the first parts, from `load_parts`; next_at, hop: as there."""
    base = base_of(top)
    w = float32(0.0)
    x = float32(0.0)
    y = float32(0.0)
    z = float32(0.0)
    weight = float32(0.0)
    first = group
    start = int32(0)
    while start < count:
        for j in range(AT_ONCE):
            i = int32(first + j * groups)
            there = i < count
            log = shared_f32(logs + select(there, i, int32(0)) * 4)
            share = select(there, exp2(log - base), float32(0.0))
            w = w + share * dims[4 * j]
            x = x + share * dims[4 * j + 1]
            y = y + share * dims[4 * j + 2]
            z = z + share * dims[4 * j + 3]
            weight = weight + share
        start = int32(start + groups * AT_ONCE)
        first = int32(first + groups * AT_ONCE)
        if start < count:
            next_at = next_at + AT_ONCE * hop
            load_parts(next_at - hop, next_at, hop, first, groups, count, dims)
    return w, x, y, z, weight


def add_groups(smem, sums, dims_of_four, group, groups, threads):
    """The sums of all groups, in the order of the groups, in every thread. groups: 1, or a multiple of AT_ONCE."""
    w, x, y, z, weight = sums
    if groups > 1:
        thread = thread_index()
        weights = int32(smem + threads * 16)
        set_shared_f32x4(smem + thread * 16, (w, x, y, z))
        set_shared_f32(weights + thread * 4, weight, 1)
        barrier()
        other = int32(thread - group * dims_of_four)  # in the first group
        at = int32(smem + other * 16)
        weight_at = int32(weights + other * 4)
        w = float32(0.0)
        x = float32(0.0)
        y = float32(0.0)
        z = float32(0.0)
        weight = float32(0.0)
        done = int32(0)
        while done < groups:
            for j in range(AT_ONCE):
                more = shared_f32x4(at + j * dims_of_four * 16)
                w = w + more[0]
                x = x + more[1]
                y = y + more[2]
                z = z + more[3]
                weight = weight + shared_f32(weight_at + j * dims_of_four * 4)
            at = int32(at + AT_ONCE * dims_of_four * 16)
            weight_at = int32(weight_at + AT_ONCE * dims_of_four * 4)
            done = int32(done + AT_ONCE)
    return w, x, y, z, weight
