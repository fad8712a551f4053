"""What Hopper's decode kernel does besides computing, in Gluon: the plan, where keys lie, loading them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from mla.backends.trtllm_gen import plan_kernel
from mla.backends.trtllm_gen.tensor_maps import COLUMNS, KEYS

keys_of = gluon.jit(plan_kernel.keys_of.fn)
pieces_in = gluon.jit(plan_kernel.pieces_in.fn)
units_of = gluon.jit(plan_kernel.units_of.fn)
deal = gluon.jit(plan_kernel.deal.fn)
first_unit = gluon.jit(plan_kernel.first_unit.fn)

BN = gl.constexpr(KEYS)  # a block is a box
R, ROPE = map(gl.constexpr, COLUMNS)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def locate(
    team, teams, lens_ptr, stride_lens, items, Q_LEN: gl.constexpr, SPARSE: gl.constexpr, most, PIECE: gl.constexpr,
    OVERHEAD: gl.constexpr, MIN_UNITS: gl.constexpr, SCAN: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    """(teams used, units of a line, teams that share it, first item of the team, units before it), as `plan_kernel.locate`."""
    VECTOR: gl.constexpr = gl.BlockedLayout([SCAN // 32], [32], [gl.num_warps()], [0])  # every warp has all items
    item = gl.arange(0, SCAN, VECTOR)
    if ONCE:
        units = units_of(lens_ptr, stride_lens, item, item < items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
        total = gl.sum(units, 0)
        used, line, sharing = deal(total, gl.max(units, 0), items, teams, MIN_UNITS)
        passed = (item < items) & (gl.associative_scan(units, 0, _add) <= first_unit(team, line, sharing))
        found = gl.sum(passed.to(gl.int32), 0)
        before = gl.sum(gl.where(passed, units, 0), 0)
    else:
        total, largest = gl.to_tensor(0), gl.to_tensor(0)
        for start in range(0, items, SCAN):
            live = start + item < items
            units = units_of(lens_ptr, stride_lens, start + item, live, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
            total += gl.sum(units, 0)
            largest = gl.maximum(largest, gl.max(units, 0))
        used, line, sharing = deal(total, largest, items, teams, MIN_UNITS)
        unit = first_unit(team, line, sharing)
        found, before, seen = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
        for start in range(0, items, SCAN):
            live = start + item < items
            units = units_of(lens_ptr, stride_lens, start + item, live, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD)
            passed = live & (seen + gl.associative_scan(units, 0, _add) <= unit)
            found += gl.sum(passed.to(gl.int32), 0)
            before += gl.sum(gl.where(passed, units, 0), 0)
            seen += gl.sum(units, 0)
    return used, line, sharing, found, before


@gluon.jit
def page_in(column, live, table, stride_table, width, num_pages):
    """(page ids in columns of a table, whether there are such pages); -1 where not `live`."""
    page = gl.load(table + column.to(gl.int64) * stride_table, mask=live & (column < width), other=-1)
    return page, (page >= 0) & (page < num_pages)


@gluon.jit
def keys_at(
    start, offsets, end, table, stride_table, width, num_pages, stride_page, TOKEN: gl.constexpr, PAGE: gl.constexpr,
    SPARSE: gl.constexpr, FLAT: gl.constexpr, ONE_PAGE: gl.constexpr,
):  # fmt: skip
    """(element offsets, readable, what joins the scores) of keys start + offsets, as `decode_kernel.keys_at`."""
    position = start + offsets
    readable = position < end
    if SPARSE:
        slot = gl.load(table + position.to(gl.int64) * stride_table, mask=readable, other=-1).to(gl.int64)
        readable = readable & (slot >= 0) & (slot < num_pages.to(gl.int64) * PAGE)
        slot = gl.where(readable, slot, 0)
        if FLAT:
            where = slot * TOKEN
        else:
            where = (slot // PAGE) * stride_page + (slot % PAGE) * TOKEN
        joins = gl.where(readable, 0.0, float("-inf"))
    else:
        joins = gl.where(readable, 0.0, float("-inf"))
        if ONE_PAGE:
            page, known = page_in(start // PAGE, start < end, table, stride_table, width, num_pages)
            page = gl.where(known, page, 0).to(gl.int64)
            where = page * stride_page + (start % PAGE) * TOKEN + (offsets * TOKEN).to(gl.int64)
        else:
            column = position // PAGE
            page, known = page_in(column, readable, table, stride_table, width, num_pages)
            page = gl.where(known, page, 0).to(gl.int64)
            where = page * stride_page + (position - column * PAGE) * TOKEN
        joins = gl.where(readable & (known == 0), float("nan"), joins)
        readable = readable & known
    return where, readable, joins


@gluon.jit
def span_of(
    item, before, lo, hi, lens_ptr, stride_lens, items, most, Q_LEN: gl.constexpr, SPARSE: gl.constexpr,
    PIECE: gl.constexpr, OVERHEAD: gl.constexpr,
):  # fmt: skip
    """(keys, length, blocks, pieces, first piece, one past the last) of a team's part of an item."""
    keys, length = keys_of(lens_ptr, stride_lens, item, item < items, Q_LEN, SPARSE, most)
    blocks, pieces = pieces_in(keys, BN, PIECE)
    first = gl.maximum(lo - before - OVERHEAD, 0)
    last = gl.minimum(hi - before - OVERHEAD, pieces)
    return keys, length, blocks, pieces, first, last


@gluon.jit
def load_rows(
    start, end, place, parity, keys, ropes, bias, full, empty, kv_ptr, table, stride_table, width, num_pages, stride_page,
    TOKEN: gl.constexpr, PAGE: gl.constexpr, SPARSE: gl.constexpr, FLAT: gl.constexpr, VEC: gl.constexpr,
):  # fmt: skip
    """As `load_block`, key by key."""
    # Eight threads copy 128 bytes of a key at a time, so that few addresses serve many copies.
    WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 2, 64 // VEC], [4, 1], [1, 0])
    ONE_PAGE: gl.constexpr = PAGE % BN == 0
    where, readable, _ = keys_at(
        start, gl.arange(0, BN, gl.SliceLayout(1, WIDE)), end, table, stride_table, width, num_pages, stride_page, TOKEN, PAGE,
        SPARSE, FLAT, ONE_PAGE,
    )  # fmt: skip
    rope_where, rope_readable, joins = keys_at(
        start, gl.arange(0, BN, gl.SliceLayout(1, NARROW)), end, table, stride_table, width, num_pages, stride_page, TOKEN,
        PAGE, SPARSE, FLAT, ONE_PAGE,
    )  # fmt: skip
    # Addresses are multiples of 16 bytes, which a worker does not know of its arguments.
    at = gl.multiple_of(kv_ptr + where[:, None], [16, 16]) + gl.arange(0, R, gl.SliceLayout(0, WIDE))[None, :]
    rope_at = gl.multiple_of(kv_ptr + rope_where[:, None], [16, 16])
    rope_at += R + gl.arange(0, ROPE, gl.SliceLayout(0, NARROW))[None, :]
    mbarrier.wait(empty.index(place), parity)
    async_copy.async_copy_global_to_shared(ropes.index(place), rope_at, mask=rope_readable[:, None])
    async_copy.async_copy_global_to_shared(keys.index(place), at, mask=readable[:, None])
    bias.index(place).store(joins)
    async_copy.mbarrier_arrive(full.index(place), increment_count=False)
    fence_async_shared()
    mbarrier.arrive(full.index(place), count=1)  # one more arrival, for what was stored without an asynchronous copy


@gluon.jit
def load_box(
    start, place, parity, keys, ropes, bias, full, empty, latent_map, rope_map, table, stride_table, width, num_pages,
    stride_page, TOKEN: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As `load_block`, for a block that is full and lies within one page: two requests to the copy engine (TMA)."""
    PLAIN: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    page, known = page_in(start // PAGE, True, table, stride_table, width, num_pages)
    # Rows outside the map are zeros.
    row = gl.where(known, page * (stride_page // TOKEN) + start % PAGE, -BN).to(gl.int32)
    joins = gl.full([BN], 0.0, gl.float32, PLAIN) + gl.where(known, 0.0, float("nan"))
    mbarrier.wait(empty.index(place), parity)
    mbarrier.expect(full.index(place), latent_map.block_type.nbytes + rope_map.block_type.nbytes)
    tma.async_copy_global_to_shared(rope_map, [row, R], full.index(place), ropes.index(place))
    tma.async_copy_global_to_shared(latent_map, [row, 0], full.index(place), keys.index(place))
    bias.index(place).store(joins)
    mbarrier.arrive(full.index(place), count=128)  # the arrivals of `load_rows`, one of which was to expect the bytes


@gluon.jit
def load_block(
    start, end, place, parity, keys, ropes, bias, full, empty, kv_ptr, latent_map, rope_map, table, stride_table, width,
    num_pages, stride_page, TOKEN: gl.constexpr, PAGE: gl.constexpr, SPARSE: gl.constexpr, FLAT: gl.constexpr,
    BOXES: gl.constexpr, VEC: gl.constexpr,
):  # fmt: skip
    """The keys from `start` on, up to `end`, into one place of the ring once it is free; zeros past the end.

    What joins their scores goes with them.
    """
    if BOXES and start + BN <= end:
        load_box(
            start, place, parity, keys, ropes, bias, full, empty, latent_map, rope_map, table, stride_table, width, num_pages,
            stride_page, TOKEN, PAGE,
        )  # fmt: skip
    else:
        load_rows(
            start, end, place, parity, keys, ropes, bias, full, empty, kv_ptr, table, stride_table, width, num_pages,
            stride_page, TOKEN, PAGE, SPARSE, FLAT, VEC,
        )  # fmt: skip


@gluon.jit
def load_warps(
    keys, ropes, bias, full, empty, kv_ptr, latent_map, rope_map, table_ptr, lens_ptr, lo, hi, item, before, stride_page,
    stride_table_request, stride_table_token, stride_table, stride_lens, items, width, num_pages, most, Q_LEN: gl.constexpr,
    PAGE: gl.constexpr, TOKEN: gl.constexpr, SPARSE: gl.constexpr, FLAT: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, PIECE: gl.constexpr, OVERHEAD: gl.constexpr, VEC: gl.constexpr,
):  # fmt: skip
    """The loading group: every block of the team's spans into the ring, in order, as places come free."""
    count = gl.to_tensor(0)
    while before < hi:
        here, _, blocks, pieces, first, last = span_of(
            item, before, lo, hi, lens_ptr, stride_lens, items, most, Q_LEN, SPARSE, PIECE, OVERHEAD
        )
        if SPARSE:
            table = table_ptr + (item // Q_LEN).to(gl.int64) * stride_table_request
            table += (item % Q_LEN).to(gl.int64) * stride_table_token
        else:
            table = table_ptr + item.to(gl.int64) * stride_table_request
        begin, end = first, last
        if PIECE:
            begin, end = first * PIECE, gl.minimum(last * PIECE, blocks)
        stop = gl.minimum(end, gl.cdiv(here, BN))
        if SPARSE:  # known not to be before `begin`, which spares this loop 27 spilled registers
            stop = gl.maximum(stop, begin)
        for block in range(begin, stop):
            load_block(
                block * BN, here, count % STAGES, ((count // STAGES) & 1) ^ 1, keys, ropes, bias, full, empty, kv_ptr, latent_map,
                rope_map, table, stride_table, width, num_pages, stride_page, TOKEN, PAGE, SPARSE, FLAT, BOXES, VEC,
            )  # fmt: skip
            count += 1
        before += pieces + OVERHEAD
        item += 1


@gluon.jit
def without_odd(value, start, late, WIDE: gl.constexpr, PART: gl.constexpr):
    """(value [PART, R], whether any number of it was odd [PART]) of keys `start` + 0, 1, ...: odd numbers become 0.

    Odd are numbers that are not finite, of keys from `late` on. Those are not seen by every row, and 0 * NaN is NaN.
    """
    is_late = start + gl.arange(0, PART, gl.SliceLayout(1, WIDE)) >= late
    odd = is_late[:, None] & ((gl.abs(value.to(gl.float32)) < float("inf")) == 0)
    return gl.where(odd, gl.zeros_like(value), value), gl.max(odd.to(gl.int32), 1) > 0
