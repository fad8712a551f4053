"""The decode kernel: a persistent grid of teams, each walking its share of the batch's blocks of keys.

A program holds BM rows (of the Q * H query vectors that share an item's keys) and walks the keys BN at a time. Each block
of keys is loaded once and serves both products: scores = q . k, and the first R numbers of a key are its value. Online
softmax in log2; a row's arithmetic depends on no other row.
"""

import triton
import triton.language as tl

from mla.backends.trtllm_gen.plan_kernel import first_unit, keys_of, locate, pieces_in

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
R = tl.constexpr(512)
HALF = tl.constexpr(256)  # the latent is handled in two halves: two independent chains for the tensor cores
ROPE = tl.constexpr(64)


@triton.jit
def read_scale(scale, IS_TENSOR: tl.constexpr):
    """A scale as a number: given as one, or read from the device now."""
    if IS_TENSOR:
        number = tl.load(scale)
    else:
        number = scale
    return number


@triton.jit
def finish_rows(m, weight, head, row_live, sinks_ptr, stride_sink, HAS_SINKS: tl.constexpr):
    """(factor that ends the accumulator, log2-sum-exp) of complete rows: sinks join, an empty row is the identity.

    The accumulator is relative to 2^m; `weight` is the sum of its weights. Both [BM].
    """
    top = m
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head.to(tl.int64) * stride_sink, mask=row_live, other=0.0) * LOG2E
        top = tl.maximum(m, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    rescale = tl.exp2(m - top)
    weight = weight * rescale
    if HAS_SINKS:
        weight += tl.exp2(sink - top)
    return tl.where(weight == 0.0, 0.0, rescale / weight), top + tl.log2(weight)


@triton.jit
def softmax_step(s, m, weights):
    """One block of log2 scores s [BM, keys] joins: (its weights p [BM, keys], rescale [BM] of what was, m, weights).

    `weights` [BM, keys] holds sums of weights that are added up over its keys at the end only.
    """
    new_m = tl.maximum(m, tl.max(s, 1))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row without a key yet: its weights are exp2(-inf) = 0
    p = tl.exp2(s - base[:, None])
    rescale = tl.exp2(m - base)
    return p, rescale, new_m, weights * rescale[:, None] + p


@triton.jit
def keys_at(
    start, offsets, end, table, stride_table, width, num_pages, stride_page, TOKEN: tl.constexpr,
    PAGE: tl.constexpr, SPARSE: tl.constexpr, FLAT: tl.constexpr, ONE_PAGE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where the keys start + offsets of an item lie: (element offsets, int64; readable; what joins their scores).

    What joins is 0 for a key, -inf where there is none (at or past `end`, or a hole in a sparse list), and NaN for a dense
    key whose page is outside the pool or the table: such a row is loud, and no other memory is touched.
    """
    position = start + offsets
    readable = position < end
    if SPARSE:
        slot = tl.load(table + position.to(tl.int64) * stride_table, mask=readable, other=-1).to(tl.int64)
        readable = readable & (slot >= 0) & (slot < num_pages.to(tl.int64) * PAGE)
        slot = tl.where(readable, slot, 0)
        if FLAT:  # one stride serves the whole pool
            where = slot * TOKEN
        else:
            where = (slot // PAGE) * stride_page + (slot % PAGE) * TOKEN
        joins = tl.where(readable, 0.0, float("-inf"))
    else:
        joins = tl.where(readable, 0.0, float("-inf"))
        if ONE_PAGE:  # all of them in one page
            column = start // PAGE
            page = tl.load(table + column.to(tl.int64) * stride_table, mask=(column < width) & (start < end), other=-1)
            known = (page >= 0) & (page < num_pages)
            page = tl.where(known, page, 0).to(tl.int64)
            where = page * stride_page + (start % PAGE) * TOKEN + offsets * TOKEN
        else:
            column = position // PAGE
            page = tl.load(table + column.to(tl.int64) * stride_table, mask=readable & (column < width), other=-1)
            known = (page >= 0) & (page < num_pages)
            page = tl.where(known, page, 0).to(tl.int64)
            where = page * stride_page + (position - column * PAGE) * TOKEN
        joins = tl.where(readable & (known == 0), float("nan"), joins)
        readable = readable & known
    return tl.multiple_of(where, ALIGN), readable, joins


@triton.jit
def load_keys(kv_ptr, where, readable, half_cols, rope_cols):
    """Both halves of the latents [keys, 256] and the rope parts [keys, 64] at those offsets; zeros where unreadable."""
    base = kv_ptr + where[:, None]
    left = tl.load(base + half_cols[None, :], mask=readable[:, None], other=0.0)
    right = tl.load(base + HALF + half_cols[None, :], mask=readable[:, None], other=0.0)
    rope = tl.load(base + rope_cols[None, :], mask=readable[:, None], other=0.0)
    return left, right, rope


@triton.jit
def scores_of(q_left, q_right, q_rope, left, right, rope, SCORE: tl.constexpr):
    """q . k over all D: [BM, keys]."""
    s = tl.dot(q_rope, tl.trans(rope.to(SCORE)), tl.dot(q_left, tl.trans(left.to(SCORE))))
    return s + tl.dot(q_right, tl.trans(right.to(SCORE)))


@triton.jit
def late_keys(
    q_left, q_right, q_rope, m, weight, acc_left, acc_right, first, length, last_seen, scale, kv_ptr, table,
    stride_table, width, num_pages, stride_page, TOKEN: tl.constexpr, PAGE: tl.constexpr, LATE: tl.constexpr,
    ALIGN: tl.constexpr, SCORE: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """The last Q - 1 keys of a request join, which its earlier query tokens must not see: (m, weight, both acc).

    A weight of 0 is not enough there, since 0 * NaN is NaN: values that are not finite stay out of the product and are
    added by themselves to the rows that do see them. `last_seen` [BM] is the last position that each row sees.
    """
    offsets = tl.arange(0, LATE)
    half_cols = tl.arange(0, HALF)
    rope_cols = R + tl.arange(0, ROPE)
    for start in range(first, length, LATE):
        where, readable, joins = keys_at(
            start, offsets, length, table, stride_table, width, num_pages, stride_page, TOKEN,
            PAGE, False, False, False, ALIGN,
        )  # fmt: skip
        left, right, rope = load_keys(kv_ptr, where, readable, half_cols, rope_cols)
        s = scores_of(q_left, q_right, q_rope, left, right, rope, SCORE) * scale + joins[None, :]  # [BM, LATE]
        seen = (start + offsets)[None, :] <= last_seen[:, None]
        p, rescale, m, weights = softmax_step(tl.where(seen, s, float("-inf")), m, tl.zeros_like(s))
        weight = weight * rescale + tl.sum(weights, 1)
        left, right = left.to(tl.float32), right.to(tl.float32)
        finite_left, finite_right = tl.abs(left) < float("inf"), tl.abs(right) < float("inf")
        p_low = p.to(WEIGHT)
        acc_left = tl.dot(p_low, tl.where(finite_left, left, 0.0).to(WEIGHT), acc_left * rescale[:, None])
        acc_right = tl.dot(p_low, tl.where(finite_right, right, 0.0).to(WEIGHT), acc_right * rescale[:, None])
        all_finite = (finite_left & finite_right).to(tl.int32)
        if tl.min(tl.min(all_finite, 1), 0) == 0:
            for key in range(LATE):
                chosen = offsets == key
                at = tl.sum(tl.where(chosen, where, 0), 0)
                there = (half_cols >= 0) & (tl.sum((chosen & readable).to(tl.int32), 0) > 0)
                p_key = tl.sum(tl.where(chosen[None, :], p, 0.0), 1)[:, None]  # [BM, 1]
                sees = (start + key <= last_seen)[:, None]
                v = tl.load(kv_ptr + at + half_cols, mask=there, other=0.0).to(tl.float32)[None, :]  # [1, 256]
                acc_left = tl.where(sees & ((tl.abs(v) < float("inf")) == 0), acc_left + p_key * v, acc_left)
                v = tl.load(kv_ptr + at + HALF + half_cols, mask=there, other=0.0).to(tl.float32)[None, :]
                acc_right = tl.where(sees & ((tl.abs(v) < float("inf")) == 0), acc_right + p_key * v, acc_right)
    return m, weight, acc_left, acc_right


@triton.jit(
    do_not_specialize=[
        "bmm1", "bmm2", "stride_q_request", "stride_q_token", "stride_q_head", "stride_page",
        "stride_table_request", "stride_table_token", "stride_table", "stride_lens", "stride_sink",
        "stride_out_request", "stride_out_token", "stride_out_head", "stride_lse_request", "stride_lse_token",
        "stride_lse_head", "items", "teams", "tiles", "width", "num_pages", "most",
    ],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "lse_ptr", "sinks_ptr", "bmm1", "bmm2"]
)  # fmt: skip
def decode_kernel(
    q_ptr, kv_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, sinks_ptr, bmm1, bmm2, part_ptr, part_lse_ptr,
    stride_q_request: tl.int64, stride_q_token: tl.int64, stride_q_head: tl.int64,
    stride_page: tl.int64,
    stride_table_request: tl.int64, stride_table_token: tl.int64, stride_table: tl.int64,
    stride_lens: tl.int64, stride_sink: tl.int64,
    stride_out_request: tl.int64, stride_out_token: tl.int64, stride_out_head: tl.int64,
    stride_lse_request: tl.int64, stride_lse_token: tl.int64, stride_lse_head: tl.int64,
    items: tl.int32, teams: tl.int32, tiles: tl.int32, width: tl.int32, num_pages: tl.int32, most: tl.int32,
    Q_LEN: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, TOKEN: tl.constexpr, SPARSE: tl.constexpr,
    FLAT: tl.constexpr, ALIGN: tl.constexpr, Q_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, BASE_E: tl.constexpr,
    TENSOR_1: tl.constexpr, TENSOR_2: tl.constexpr, SCORE: tl.constexpr, WEIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr, PIECE: tl.constexpr,
    OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr, SCAN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of every item: finished ones to `out` and `lse`, parts of cut ones to `part` and `part_lse`.

    Grid: teams * tiles. PIECE = 0 deals blocks, and part [2 * teams, tiles, BM, R] fp32 holds at most two parts of a team:
    [1] the beginning of an item that a later team goes on with, [0] any other. PIECE > 0 deals pieces of that many
    blocks, cut at places that depend on the item alone, and part [pieces of the batch, tiles, BM, R] holds each. SCORE and
    WEIGHT are the dtypes of the two products' inputs; the other names are those of the call.
    """
    tile = tl.program_id(0) % tiles
    team = tl.program_id(0) // tiles
    if PDL:
        tl.extra.cuda.gdc_wait()  # for whatever writes the inputs
        tl.extra.cuda.gdc_launch_dependents()  # the merge may take its place: it waits for this grid's end itself
    used, line, sharing, item, before = locate(
        team, teams, lens_ptr, stride_lens, items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD, MIN_UNITS, SCAN, ONCE
    )
    lo = first_unit(team, line, sharing)
    hi = tl.where(team < used, first_unit(team + 1, line, sharing), 0)  # nothing for a team that is not used

    ROWS: tl.constexpr = HEADS if SPARSE else Q_LEN * HEADS
    tile_row = tl.arange(0, BM)
    row = tile * BM + tile_row  # [BM] row of the item
    row_live = row < ROWS
    head = row % HEADS
    half_cols = tl.arange(0, HALF)
    rope_cols = R + tl.arange(0, ROPE)
    offsets = tl.arange(0, BN)
    scale = read_scale(bmm1, TENSOR_1) * LOG2E
    out_scale = read_scale(bmm2, TENSOR_2)

    while before < hi:
        table = table_ptr
        if SPARSE:
            request = (item // Q_LEN).to(tl.int64)
            token = tl.zeros([BM], tl.int32) + item % Q_LEN
            table += (item % Q_LEN).to(tl.int64) * stride_table_token
        else:
            request = item.to(tl.int64)
            token = row // HEADS
        table += request * stride_table_request
        shared, length = keys_of(lens_ptr, stride_lens, item, item < items, Q_LEN, SPARSE, most)
        blocks, pieces = pieces_in(shared, BN, PIECE)
        if not SPARSE:  # the last Q - 1 keys come apart
            shared = tl.minimum(shared, tl.maximum(length - Q_LEN + 1, 0))
        first = tl.maximum(lo - before - OVERHEAD, 0)
        last = tl.minimum(hi - before - OVERHEAD, pieces)
        step = 1 if PIECE else tl.maximum(last - first, 1)
        for piece in range(first, last, step):
            if PIECE:
                begin, end = piece * PIECE, tl.minimum(piece * PIECE + PIECE, blocks)
            else:
                begin, end = first, last
            q_row = tl.multiple_of(
                request * stride_q_request + token.to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head,
                Q_ALIGN,
            )
            row_mask = row_live[:, None]
            q_left = tl.load(q_ptr + q_row[:, None] + half_cols[None, :], mask=row_mask, other=0.0).to(
                SCORE
            )  # [BM, 256]
            q_right = tl.load(q_ptr + q_row[:, None] + HALF + half_cols[None, :], mask=row_mask, other=0.0).to(SCORE)
            q_rope = tl.load(q_ptr + q_row[:, None] + rope_cols[None, :], mask=row_mask, other=0.0).to(
                SCORE
            )  # [BM, 64]
            m = tl.full([BM], float("-inf"), tl.float32)
            weights = tl.zeros([BM, BN], tl.float32)
            acc_left = tl.zeros([BM, HALF], tl.float32)
            acc_right = tl.zeros([BM, HALF], tl.float32)
            for block in tl.range(begin, tl.minimum(end, tl.cdiv(shared, BN)), num_stages=STAGES):
                where, readable, joins = keys_at(
                    block * BN, offsets, shared, table, stride_table, width, num_pages, stride_page, TOKEN,
                    PAGE, SPARSE, FLAT, PAGE % BN == 0, ALIGN,
                )  # fmt: skip
                left, right, rope = load_keys(kv_ptr, where, readable, half_cols, rope_cols)
                s = scores_of(q_left, q_right, q_rope, left, right, rope, SCORE) * scale + joins[None, :]  # [BM, BN]
                p, rescale, m, weights = softmax_step(s, m, weights)
                p_low = p.to(WEIGHT)
                acc_left = tl.dot(p_low, left.to(WEIGHT), acc_left * rescale[:, None])  # [BM, 256]
                acc_right = tl.dot(p_low, right.to(WEIGHT), acc_right * rescale[:, None])
            weight = tl.sum(weights, 1)
            if (not SPARSE) and Q_LEN > 1:
                if end == blocks:
                    m, weight, acc_left, acc_right = late_keys(
                        q_left, q_right, q_rope, m, weight, acc_left, acc_right, tl.maximum(length - Q_LEN + 1, 0), length,
                        length - Q_LEN + token, scale, kv_ptr, table, stride_table, width, num_pages, stride_page, TOKEN,
                        PAGE, LATE, ALIGN, SCORE, WEIGHT,
                    )  # fmt: skip
            if (begin == 0) & (end == blocks):
                factor, lse = finish_rows(m, weight, head, row_live, sinks_ptr, stride_sink, HAS_SINKS)
                out_row = tl.multiple_of(
                    request * stride_out_request + token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head,
                    OUT_ALIGN,
                )  # fmt: skip
                ends = (factor * out_scale)[:, None]
                out_at = out_ptr + out_row[:, None] + half_cols[None, :]
                tl.store(out_at, (acc_left * ends).to(out_ptr.dtype.element_ty), mask=row_mask)
                tl.store(out_at + HALF, (acc_right * ends).to(out_ptr.dtype.element_ty), mask=row_mask)
                if HAS_LSE:
                    lse_row = request * stride_lse_request + token.to(tl.int64) * stride_lse_token
                    lse_row += head.to(tl.int64) * stride_lse_head
                    tl.store(lse_ptr + lse_row, lse * LN2 if BASE_E else lse, mask=row_live)
            else:
                if PIECE:
                    slot = (before + piece).to(tl.int64)
                else:
                    slot = (team * 2 + (begin == 0).to(tl.int32)).to(tl.int64)
                part_row = (slot * tiles + tile) * BM + tile_row  # [BM]
                ends = tl.where(weight == 0.0, 0.0, 1.0 / weight)[:, None]
                part_at = part_ptr + part_row[:, None] * R + half_cols[None, :]
                tl.store(part_at, acc_left * ends)
                tl.store(part_at + HALF, acc_right * ends)
                tl.store(part_lse_ptr + part_row, tl.where(m == float("-inf"), 0.0, m) + tl.log2(weight))
        before += pieces + OVERHEAD
        item += 1
