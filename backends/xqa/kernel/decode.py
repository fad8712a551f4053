# mypy: ignore-errors
"""The kernel that reads the cache: each block walks its team's units, request by request, tile by tile.

One tile's life with two stages (b is a barrier, the numbers are tiles):

    wait 1, b, start 2, scores 1, b, softmax 1, b, values 1, wait 2, b, start 3, scores 2, ...

The barrier after the wait does three jobs: every thread's copies have landed, every warp is done with the stage that is
filled next, and every warp is done with the weights of the tile before.

With three stages or more (VALUES_LATER) a tile's values wait until the next tile's softmax: two barriers a tile, and
the softmax, which mostly waits, stands beside a product that does not need it.

    wait 1, b, start 2, scores 1, b, values 0, softmax 1, wait 2, b, start 3, scores 2, b, values 1, softmax 2, ...

Where two tiles are under way (STARTS_LATE), the next one has time to start behind the second barrier:

    wait 1, b, scores 1, b, start 3, values 0, softmax 1, wait 2, b, scores 2, b, start 4, values 1, softmax 2, ...
"""

from mla.backends.xqa.isa import (
    barrier,
    barrier_any,
    block_index,
    cp_async_commit,
    divide,
    exp2,
    larger,
    let_next_grid_start,
    load_f32,
    log2,
    quotient,
    set_shared_f32,
    set_shared_i32,
    shared_base,
    shared_f32,
    shared_i32,
    shuffle_xor,
    store_f32,
    store_f32x2,
    store_i32,
    thread_index,
    thread_index_anew,
)
from mla.backends.xqa.kernel.attend import (
    add_late_values,
    add_values,
    find_places,
    partial_scores,
    place_in_sums,
    softmax,
    whole_scores,
)
from mla.backends.xqa.kernel.constants import (
    ACCUMULATORS,
    AHEAD,
    BLOCKS_PER_SM,
    DEPENDENT,
    ENTRY_WORDS,
    FACTOR_AT,
    KEYS_AT,
    OUT_BYTES,
    PART_BYTES,
    QUERIES_IN_SHARED,
    QUERY_WORDS,
    ROW_LANE_BITS,
    ROW_LANES,
    ROW_TILES,
    ROWS,
    SPARSE,
    STAGE_BYTES,
    STAGES,
    STARTS_LATE,
    THREADS,
    TILE,
    TILE_BITS,
    TOKENS_AT,
    TOKENS_EACH,
    VALUES_LATER,
    WEIGHT_PITCH,
    WEIGHTS_AT,
    WEIGHTS_BYTES,
    ZEROS_AT,
)
from mla.backends.xqa.kernel.memory import (
    load_queries,
    load_tile,
    policy_of_copies,
    prefetch_queries,
    prefetch_table,
    store_out,
    table_entry,
)
from mla.backends.xqa.kernel.numbers import (
    LOG2_E,
    LOWEST,
    NEGATIVE_INFINITY,
    NOT_A_NUMBER,
    cuda,
    float32,
    int32,
    int64,
    select,
    smaller_int,
    uint32,
    wait_for_tile,
)
from mla.backends.xqa.kernel.schedule import (
    first_unit_of,
    next_share,
    request_at,
    share_of,
    sum_of_first,
    units_after,
    units_of_one,
    visible_tokens,
)


def decode(
    query,
    query_request,
    query_token,
    query_head,
    pool,
    page_step,
    token_step,
    entries,
    page_size,
    page_factor,
    page_shift,
    table,
    table_request,
    table_token,
    table_column,
    table_wide,
    columns,
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
    bmm1,
    bmm1_at,
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
):
    """Attention of every row over its team's share of its keys.

    Grid: teams * tiles blocks. Addresses are int64, steps are in bytes, a scale is a number or, where its address is
    not 0, the fp32 number at that address.

    parts, part_lse: slots of [tiles, ROWS] rows (512 fp32, and their log-sum-exp in base 2), two for each team: the
    second for the head of a request that the next team goes on with, the first for a later part; or, when requests are
    cut into pieces of `piece` tiles, `pieces` for each request. begins: [requests + 1] int32, the first unit of each
    request, then a team's share; the merge kernel reads it. page_factor, page_shift: see `memory.page_of`.
    """
    smem = shared_base()
    _, tile = team_and_tile(tiles)
    team = team_of_block(tiles, teams)
    if DEPENDENT:
        let_next_grid_start()
    fill_shared(smem, tile, heads)
    measure = (lengths, length_step, length_wide, q_len, room)
    units = units_of_one(measure, requests, overhead, int32(0))
    prefetch_likely(
        (query, query_request, query_token, query_head),
        (table, table_request, table_token, table_column, columns),
        (requests, q_len, heads, teams, tiles),
    )
    units_of_first = sum_of_first(smem, measure, requests, overhead, units)
    total = int32(units_of_first[2] + units_after(smem, measure, requests, overhead, int32(THREADS)))
    policy = policy_of_copies(total - requests * overhead)
    share = share_of(total, teams, one_each, at_least)
    unit = first_unit_of(team, total, share)
    end = first_unit_of(team + 1, total, share)
    store_i32(begins + int64(requests) * 4, share, one_thread(tiles) & (team == 0))
    words = cuda.local.array(QUERY_WORDS, uint32)
    sums = cuda.local.array(ACCUMULATORS, float32)  # [row tile, 8 columns of 8 dims, c0..c3]
    if unit < end:
        request, begin = request_at(smem, measure, requests, overhead, units_of_first, unit)
        while unit < end:
            seen_by_first, keys = visible_tokens(measure, request, 1)
            count = int32((keys + (TILE - 1)) >> TILE_BITS)
            first_tile, end_tile, after = next_share(unit, end, begin, overhead, count, piece)
            store_i32(begins + int64(request) * 4, begin, one_thread(tiles) & (unit == begin))
            if (first_tile < end_tile) | ((count == 0) & (unit == begin)):
                owner = int64(quotient(request, q_len) if SPARSE else request)  # of the call
                token = int64(request - owner * q_len if SPARSE else 0)
                top, total = attend(
                    smem,
                    (query + owner * query_request + token * query_token, query_token, query_head),
                    (pool, page_step, token_step, entries, (page_size, page_factor, page_shift), policy),
                    (table + owner * table_request + token * table_token, table_column, table_wide, columns),
                    (tiles, heads, heads if SPARSE else q_len * heads),
                    (first_tile, end_tile),
                    (seen_by_first, keys),
                    load_f32(bmm1_at, bmm1_at != 0, bmm1) * LOG2_E,
                    words,
                    sums,
                )
                if (first_tile == 0) & (end_tile == count):
                    finish_rows(
                        smem,
                        (out + owner * out_request + token * out_token, out_token, out_head),
                        (lse, lse + owner * lse_request + token * lse_token, lse_token, lse_head, lse_unit),
                        (tiles, heads, heads if SPARSE else q_len * heads),
                        sinks,
                        load_f32(bmm2_at, bmm2_at != 0, bmm2),
                        top,
                        total,
                        sums,
                    )
                else:
                    if piece > 0:
                        slot = int64(request) * pieces + quotient(first_tile, piece)
                    else:
                        slot = int64(team_of_block(tiles, teams)) * 2 + select(first_tile == 0, 1, 0)
                    leave_part(smem, parts, part_lse, tiles, slot, top, total, sums)
                barrier()  # the stages and the factors have been read
            unit = after
            if after >= begin + overhead + count:
                begin = int32(begin + overhead + count)
                request = int32(request + 1)


def prefetch_likely(query, table, sizes):
    """What the team would read first if all requests were as long, into L2 while their lengths come: a row of the
    table, and this block's query vectors. A wrong guess costs nothing but that."""
    query, query_request, query_token, query_head = query
    table, table_request, table_token, table_column, columns = table
    requests, q_len, heads, teams, tiles = sizes
    request = int32(quotient(team_of_block(tiles, teams) * requests, teams))
    owner = int64(quotient(request, q_len) if SPARSE else request)
    token = int64(request - owner * q_len if SPARSE else 0)
    prefetch_table(table + owner * table_request + token * table_token, table_column, columns)
    here = (query + owner * query_request + token * query_token, query_token, query_head)
    prefetch_queries(here, team_and_tile(tiles)[1], heads if SPARSE else q_len * heads, heads)


def team_and_tile(tiles):
    """The number of this block's team among blocks, and its row tile. Asked for anew each time: it is cheaper than
    registers in the main loop."""
    block = block_index()
    team = quotient(block, tiles)
    return int32(team), int32(block - team * tiles)


def team_of_block(tiles, teams):
    """This block's team. Blocks of one multiprocessor have neighbouring numbers: teams are dealt so that the first half
    of them, which may be all that have work, are on different multiprocessors.
    """
    number, _ = team_and_tile(tiles)
    if BLOCKS_PER_SM == 2:
        number = (number >> 1) + (number & 1) * ((teams + 1) >> 1)
    return int32(number)


def one_thread(tiles):
    """Whether this is the one thread of its team that tells the merge kernel about it."""
    return (thread_index_anew() == 0) & (team_and_tile(tiles)[1] == 0)


def fill_shared(smem, tile, heads):
    """What stays the same in shared memory: each row's query token, and zeros."""
    thread = thread_index_anew()
    for i in range((ROWS + THREADS - 1) // THREADS):
        row = thread + i * THREADS
        set_shared_i32(smem + TOKENS_AT + row * 4, quotient(tile * ROWS + row, heads), row < ROWS)
    set_shared_i32(smem + ZEROS_AT + thread * 4, 0, thread < 32)


def attend(smem, query, pool, table, shape, share, seen, scale, words, sums):
    """This team's share of one request: returns (the score whose weight is 1, the sum of weights) of the row whose
    softmax this thread computes; `sums` become the sums of weighted values.

    query, pool, table: see `memory.py`. shape: (row tiles, heads, rows). share: (first tile of keys, end).
    seen: keys that (query token 0 sees, the last one sees).
    """
    tiles, heads, rows = shape
    first_tile, end_tile = share
    seen_by_first, keys = seen
    _, tile = team_and_tile(tiles)
    common = int32(seen_by_first + quotient(tile * ROWS, heads))  # seen by every row of this block
    last_token = quotient(smaller_int(tile * ROWS + ROWS, rows) - 1, heads)
    until = int32(smaller_int(seen_by_first + last_token, keys))  # seen by any
    end_tile = int32(smaller_int(end_tile, (until + (TILE - 1)) >> TILE_BITS))
    pages = pool[4]
    limit = int32(seen_by_first + shared_i32(smem + TOKENS_AT + (thread_index() >> ROW_LANE_BITS) * 4))
    entries = cuda.local.array(ENTRY_WORDS, int32)
    for i in range(AHEAD + 1):  # all at once, and one tile early: their latency hides
        entries[2 * i], entries[2 * i + 1] = table_entry(table, pages, (first_tile + i) * TILE, until)
    if not QUERIES_IN_SHARED:
        load_queries(smem, words, query, tile, rows, heads)
    for i in range(AHEAD):
        start_tile(smem, i, first_tile + i, end_tile, (entries[2 * i], entries[2 * i + 1]), pool, until)
    ahead = int32(first_tile + AHEAD)
    entry = (entries[ENTRY_WORDS - 2], entries[ENTRY_WORDS - 1])
    if QUERIES_IN_SHARED:
        load_queries(smem, words, query, tile, rows, heads)
    for i in range(ACCUMULATORS):
        sums[i] = float32(0.0)
    top = NEGATIVE_INFINITY
    total = float32(0.0)
    stage = int32(0)
    keys_before = int32(smem + KEYS_AT)
    changed = int32(0)
    scores = cuda.local.array(TOKENS_EACH, float32)
    bias = cuda.local.array(TOKENS_EACH, float32)
    weights = int32(smem + WEIGHTS_AT)
    both = int32(2 * weights + WEIGHTS_BYTES)
    filled = int32(AHEAD - 1)
    if VALUES_LATER:
        weigh_nothing(weights)
    places = cuda.local.array(6, int32)
    find_places(smem, places)
    for at in range(first_tile, end_tile):
        wait_for_tile()
        if VALUES_LATER:
            rescale = barrier_any(changed)
        else:
            barrier()
        first = int32(at * TILE)
        keys = int32(smem + KEYS_AT + stage * STAGE_BYTES)
        filled = int32(select(filled == STAGES - 1, 0, filled + 1))
        if not STARTS_LATE:
            start_tile(smem, filled, ahead, end_tile, entry, pool, until)
        partial_scores(keys, words, places)
        barrier()
        if STARTS_LATE:
            start_tile(smem, filled, ahead, end_tile, entry, pool, until)
        ahead = int32(ahead + 1)
        entry = table_entry(table, pages, ahead * TILE, until)
        if VALUES_LATER:  # before the first tile there is none, which is taken as one whose tokens nobody may read
            whole_scores(smem, stage, scores, bias)
            before = int32(first - TILE)
            common_before = select(at == first_tile, int32(-TILE), common)
            add_values(smem, weights, keys_before, before, common_before, rescale, sums)
            other = int32(both - weights)
            top, total, changed = softmax(other, scores, bias, first, scale, limit, top, total)
            add_late_values(smem, weights, keys_before, before, common, until, seen_by_first, at > first_tile, sums)
            keys_before = keys
            weights = other
        else:
            whole_scores(smem, stage, scores, bias)
            top, total, changed = softmax(weights, scores, bias, first, scale, limit, top, total)
            rescale = barrier_any(changed)
            add_values(smem, weights, keys, first, common, rescale, sums)
            add_late_values(smem, weights, keys, first, common, until, seen_by_first, True, sums)
        stage = int32(select(stage == STAGES - 1, 0, stage + 1))
    if VALUES_LATER:
        rescale = barrier_any(changed)
        first = int32((end_tile - 1) * TILE)
        common_before = select(first_tile < end_tile, common, int32(-TILE))
        add_values(smem, weights, keys_before, first, common_before, rescale, sums)
        add_late_values(smem, weights, keys_before, first, common, until, seen_by_first, first_tile < end_tile, sums)
    for i in range(ROW_LANE_BITS):
        total = total + shuffle_xor(total, 1 << i)
    return top, total


def start_tile(smem, stage, number, end_tile, entry, pool, until):
    """Start copying a tile into a stage, if there is one of this number. In any case one more group of copies."""
    if number < end_tile:
        load_tile(smem, stage, number * TILE, entry, pool, until)
    cp_async_commit()


def weigh_nothing(weights):
    """Weights of 0; their decay is not read."""
    thread = thread_index_anew()
    for i in range((ROWS * WEIGHT_PITCH // 4 + THREADS - 1) // THREADS):
        word = thread + i * THREADS
        set_shared_f32(weights + word * 4, float32(0.0), word < ROWS * WEIGHT_PITCH // 4)


def finished(top, total, sink, out_scale):
    """(what the sums of a row are multiplied by, its log-sum-exp in base 2). sink: in base 2, -inf for none."""
    highest = larger(top, sink)
    base = select(highest == NEGATIVE_INFINITY, float32(0.0), highest)
    kept = exp2(top - base)
    denominator = total * kept + exp2(sink - base)
    factor = select(total == float32(0.0), float32(0.0), divide(kept * out_scale, denominator))
    # Keys, but no weight for any of them, and no sink: 0 / 0.
    factor = select(highest == LOWEST, NOT_A_NUMBER, factor)
    return factor, select(highest == LOWEST, NEGATIVE_INFINITY, highest + log2(denominator))


def finish_rows(smem, out, lse, shape, sinks, out_scale, top, total, sums):
    """A request that this team took whole: its rows into the output.

    out: (address of the request, bytes from token to token, from head to head). lse: (0 if there is none, the same
    three, what a base-2 logarithm is multiplied by). shape: (row tiles, heads, rows).
    """
    tiles, heads, rows = shape
    wanted, lse_request, lse_token, lse_head, lse_unit = lse
    out_request, out_token, out_head = out
    thread = thread_index_anew()
    _, tile = team_and_tile(tiles)
    mine = thread >> ROW_LANE_BITS
    row = tile * ROWS + mine
    token = int64(quotient(row, heads))
    head = row - token * heads
    sink = load_f32(sinks + head * 4, (sinks != 0) & (row < rows), NEGATIVE_INFINITY) * LOG2_E
    factor, row_lse = finished(top, total, sink, out_scale)
    to = lse_request + token * lse_token + head * lse_head
    store_f32(to, row_lse * lse_unit, ((thread & (ROW_LANES - 1)) == 0) & (wanted != 0) & (row < rows))
    share_factor(smem, factor)
    for m in range(ROW_TILES):
        for half in range(2):
            place = m * 16 + half * 8 + ((thread & 31) >> 2)
            row = tile * ROWS + place
            token = int64(quotient(row, heads))
            head = row - token * heads
            factor = shared_f32(smem + FACTOR_AT + place * 4)
            at = out_request + token * out_token + head * out_head + (thread >> 5) * (64 * OUT_BYTES)
            for i in range(8):
                s, s_next, dim = place_in_sums(m, half, i)
                store_out(at + dim * OUT_BYTES, sums[s] * factor, sums[s_next] * factor, row < rows)


def leave_part(smem, parts, part_lse, tiles, slot, top, total, sums):
    """A share of a request: normalised by itself, in fp32, for the merge kernel."""
    thread = thread_index_anew()
    _, tile = team_and_tile(tiles)
    first_row = (slot * tiles + tile) * ROWS
    mine = first_row + (thread >> ROW_LANE_BITS)
    store_f32(part_lse + mine * 4, top + log2(total), (thread & (ROW_LANES - 1)) == 0)
    share_factor(smem, select(total == float32(0.0), float32(0.0), divide(float32(1.0), total)))
    for m in range(ROW_TILES):
        for half in range(2):
            place = m * 16 + half * 8 + ((thread & 31) >> 2)
            factor = shared_f32(smem + FACTOR_AT + place * 4)
            at = parts + (first_row + place) * PART_BYTES + (thread >> 5) * 256
            for i in range(8):
                s, s_next, dim = place_in_sums(m, half, i)
                store_f32x2(at + dim * 4, (sums[s] * factor, sums[s_next] * factor), 1)


def share_factor(smem, factor):
    """From the threads that know a row's factor to those that hold its sums."""
    thread = thread_index_anew()
    set_shared_f32(smem + FACTOR_AT + (thread >> ROW_LANE_BITS) * 4, factor, (thread & (ROW_LANES - 1)) == 0)
    barrier()
