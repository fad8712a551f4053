"""The decode kernel of Hopper chips, in Gluon: the same plan, the same results, every warp in its place.

One group of warps loads blocks of 64 keys into a ring in shared memory (asynchronous copies, row by row, so that any page
size, stride and list of slots will do), another computes. Tiles of 16 and 32 rows swap the operands, S^T = K Q^T and
O^T = V^T P^T, which gives the 64 keys to the 64 rows of the tensor cores' instruction; tiles of 64 rows need not.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla.backends.trtllm_gen.hopper_loading_kernel import (
    BN,
    ROPE,
    R,
    first_unit,
    load_warps,
    locate,
    span_of,
    widen_warps,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def per_row(x, SWAP: gl.constexpr):
    """[BM] spread over keys or columns."""
    return x[None, :] if SWAP else x[:, None]


@gluon.jit
def per_key(x, SWAP: gl.constexpr):
    """[keys] or [columns] spread over rows."""
    return x[:, None] if SWAP else x[None, :]


@gluon.jit
def scores_of(keys, ropes, q, q_rope, S_LAYOUT: gl.constexpr, BM: gl.constexpr, SWAP: gl.constexpr):
    """q . k over all D for a block in shared memory: [keys, BM] if swapped, [BM, keys] if not."""
    if SWAP:
        s = gl.zeros([BN, BM], gl.float32, S_LAYOUT)
        s = warpgroup_mma(keys, q.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(ropes, q_rope.permute((1, 0)), s, is_async=True)
    else:
        s = gl.zeros([BM, BN], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, keys.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope, ropes.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def softmax_step(s, m, KEYS: gl.constexpr, SWAP: gl.constexpr):
    """As `decode_kernel.softmax_step`: (weights of this block, rescale [BM] of what was, m [BM])."""
    new_m = gl.maximum(m, gl.max(s, KEYS))
    base = gl.where(new_m == float("-inf"), 0.0, new_m)  # a row without a key yet
    return gl.exp2(s - per_row(base, SWAP)), gl.exp2(m - base), new_m


@gluon.jit
def add_values(keys, p, weight_smem, acc, ACC: gl.constexpr, SWAP: gl.constexpr):
    """acc plus p . values for a block in shared memory: [R, BM] if swapped, [BM, R] if not."""
    if SWAP:
        weight_smem.store(p.to(weight_smem.dtype))
        fence_async_shared()
        acc = warpgroup_mma(keys.permute((1, 0)), weight_smem, acc, is_async=True)
    else:
        weight = gl.convert_layout(p.to(weight_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
        acc = warpgroup_mma(weight, keys, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def compute_warps(
    keys, ropes, values, bias, full, empty, values_full, values_empty, q_smem, q_rope_smem, weight_smem, q_ptr, lens_ptr, out_ptr, lse_ptr, sinks_ptr,
    scale, out_scale, part_ptr, part_lse_ptr, lo, hi, item, before, tile, team, stride_q_request, stride_q_token,
    stride_q_head, stride_lens, stride_sink, stride_out_request, stride_out_token, stride_out_head, stride_lse_request,
    stride_lse_token, stride_lse_head, items, tiles, most, Q_LEN: gl.constexpr, HEADS: gl.constexpr,
    SPARSE: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, OVERHEAD: gl.constexpr, BM: gl.constexpr,
    VEC: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BASE_E: gl.constexpr,
):  # fmt: skip
    """The computing group: scores, softmax and values of every block in the order of the ring, rows at the end."""
    SWAP: gl.constexpr = BM < 64
    NARROW: gl.constexpr = VEC == 16  # e4m3
    WARPS: gl.constexpr = gl.num_warps()
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BM if SWAP else 32, 2 * VEC])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BM if SWAP else 256, 16])
    KEYS: gl.constexpr = 0 if SWAP else 1  # the axis of keys (and of columns)
    PER_ROW: gl.constexpr = gl.SliceLayout(KEYS, SCORE)
    ACC_ROW: gl.constexpr = gl.SliceLayout(KEYS, ACC)
    QL: gl.constexpr = gl.BlockedLayout([1, VEC], [1, 32], [WARPS, 1], [1, 0])
    QR: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 2, 64 // VEC], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = HEADS if SPARSE else Q_LEN * HEADS
    CAUSAL: gl.constexpr = (not SPARSE) and Q_LEN > 1
    row = tile * BM + gl.arange(0, BM, PER_ROW)
    out_row = tile * BM + gl.arange(0, BM, ACC_ROW)
    offsets = gl.arange(0, BN, gl.SliceLayout(1 - KEYS, SCORE))
    cols = gl.arange(0, R, gl.SliceLayout(1 - KEYS, ACC))
    q_row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, QL))
    q_rope_row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, QR))
    count = gl.to_tensor(0)
    while before < hi:
        here, length, blocks, pieces, first, last = span_of(
            item, before, lo, hi, lens_ptr, stride_lens, items, most, Q_LEN, SPARSE, PIECE, OVERHEAD
        )
        if SPARSE:
            request, token = (item // Q_LEN).to(gl.int64), item % Q_LEN
            q_token, q_rope_token = token, token
        else:
            request = item.to(gl.int64)
            q_token, q_rope_token = q_row // HEADS, q_rope_row // HEADS
        if first < last:
            at = request * stride_q_request + q_token.to(gl.int64) * stride_q_token + (q_row % HEADS) * stride_q_head
            q_at = q_ptr + gl.multiple_of(at, VEC)[:, None] + gl.arange(0, R, gl.SliceLayout(0, QL))[None, :]
            q = gl.load(q_at, mask=(q_row < ROWS)[:, None], other=0.0)
            at = request * stride_q_request + q_rope_token.to(gl.int64) * stride_q_token
            at += (q_rope_row % HEADS) * stride_q_head
            q_at = q_ptr + gl.multiple_of(at, VEC)[:, None] + R + gl.arange(0, ROPE, gl.SliceLayout(0, QR))[None, :]
            q_rope = gl.load(q_at, mask=(q_rope_row < ROWS)[:, None], other=0.0)
            q_smem.store(q)
            q_rope_smem.store(q_rope)
            fence_async_shared()
            gl.thread_barrier()
        step = 1
        if not PIECE:
            step = gl.maximum(last - first, 1)
        for piece in range(first, last, step):
            begin, end = first, last
            if PIECE:
                begin, end = piece * PIECE, gl.minimum(piece * PIECE + PIECE, blocks)
            m = gl.full([BM], float("-inf"), gl.float32, PER_ROW)
            if SWAP:
                weights = gl.zeros([BN, BM], gl.float32, SCORE)
                acc = gl.zeros([R, BM], gl.float32, ACC)
            else:
                weights = gl.zeros([BM, BN], gl.float32, SCORE)
                acc = gl.zeros([BM, R], gl.float32, ACC)
            for block in range(begin, gl.minimum(end, gl.cdiv(here, BN))):
                place = count % STAGES
                mbarrier.wait(full.index(place), (count // STAGES) & 1)
                fence_async_shared()
                joins = bias.index(place).load(gl.SliceLayout(1 - KEYS, SCORE))
                raw = scores_of(keys.index(place), ropes.index(place), q_smem, q_rope_smem, SCORE, BM, SWAP)
                if NARROW:
                    mbarrier.arrive(empty.index(place), count=1)
                s = raw * scale + per_key(joins, SWAP)
                if CAUSAL:
                    seen = per_key(block * BN + offsets, SWAP) <= per_row(length - Q_LEN + row // HEADS, SWAP)
                    s = gl.where(seen, s, float("-inf"))
                p, rescale, m = softmax_step(s, m, KEYS, SWAP)
                weights = weights * per_row(rescale, SWAP) + p
                acc = acc * per_row(gl.convert_layout(rescale, ACC_ROW), SWAP)
                if NARROW:
                    mbarrier.wait(values_full.index(count % 2), (count // 2) & 1)
                    fence_async_shared()
                    acc = add_values(values.index(count % 2), p, weight_smem, acc, ACC, SWAP)
                    mbarrier.arrive(values_empty.index(count % 2), count=1)
                else:
                    acc = add_values(keys.index(place), p, weight_smem, acc, ACC, SWAP)
                    mbarrier.arrive(empty.index(place), count=1)
                count += 1
            m = gl.convert_layout(m, ACC_ROW)
            weight = gl.convert_layout(gl.sum(weights, KEYS), ACC_ROW)  # [BM]
            if (begin == 0) & (end == blocks):
                row_live = out_row < ROWS
                head = out_row % HEADS
                top = m
                if HAS_SINKS:
                    sink = gl.load(sinks_ptr + head.to(gl.int64) * stride_sink, mask=row_live, other=0.0) * LOG2E
                    top = gl.maximum(m, sink)
                top = gl.where(top == float("-inf"), 0.0, top)
                rescale = gl.exp2(m - top)
                weight = weight * rescale
                if HAS_SINKS:
                    weight += gl.exp2(sink - top)
                factor = gl.where(weight == 0.0, 0.0, rescale / weight) * out_scale
                if SPARSE:
                    out_token = gl.zeros([BM], gl.int32, ACC_ROW) + item % Q_LEN
                else:
                    out_token = out_row // HEADS
                at = request * stride_out_request + out_token.to(gl.int64) * stride_out_token
                at += head.to(gl.int64) * stride_out_head
                result = (acc * per_row(factor, SWAP)).to(out_ptr.dtype.element_ty)
                gl.store(out_ptr + per_row(at, SWAP) + per_key(cols, SWAP), result, mask=per_row(row_live, SWAP))
                if HAS_LSE:
                    lse = top + gl.log2(weight)
                    if BASE_E:
                        lse = lse * LN2
                    at = request * stride_lse_request + out_token.to(gl.int64) * stride_lse_token
                    at += head.to(gl.int64) * stride_lse_head
                    gl.store(lse_ptr + at, lse, mask=row_live)
            else:
                if PIECE:
                    slot = (before + piece).to(gl.int64)
                else:
                    slot = (team * 2 + (begin == 0).to(gl.int32)).to(gl.int64)
                at = (slot * tiles + tile) * BM + gl.arange(0, BM, ACC_ROW)
                ends = gl.where(weight == 0.0, 0.0, 1.0 / weight)
                gl.store(part_ptr + per_row(at, SWAP) * R + per_key(cols, SWAP), acc * per_row(ends, SWAP))
                gl.store(part_lse_ptr + at, gl.where(m == float("-inf"), 0.0, m) + gl.log2(weight))
        before += pieces + OVERHEAD
        item += 1


@gluon.jit(
    do_not_specialize=[
        "bmm1", "bmm2", "stride_q_request", "stride_q_token", "stride_q_head", "stride_page",
        "stride_table_request", "stride_table_token", "stride_table", "stride_lens", "stride_sink",
        "stride_out_request", "stride_out_token", "stride_out_head", "stride_lse_request", "stride_lse_token",
        "stride_lse_head", "items", "teams", "tiles", "width", "num_pages", "most",
    ],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "lse_ptr", "sinks_ptr", "bmm1", "bmm2"]
)  # fmt: skip
def hopper_kernel(
    q_ptr, kv_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, sinks_ptr, bmm1, bmm2, part_ptr, part_lse_ptr,
    stride_q_request: gl.int64, stride_q_token: gl.int64, stride_q_head: gl.int64,
    stride_page: gl.int64,
    stride_table_request: gl.int64, stride_table_token: gl.int64, stride_table: gl.int64,
    stride_lens: gl.int64, stride_sink: gl.int64,
    stride_out_request: gl.int64, stride_out_token: gl.int64, stride_out_head: gl.int64,
    stride_lse_request: gl.int64, stride_lse_token: gl.int64, stride_lse_head: gl.int64,
    items: gl.int32, teams: gl.int32, tiles: gl.int32, width: gl.int32, num_pages: gl.int32, most: gl.int32,
    Q_LEN: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, TOKEN: gl.constexpr, SPARSE: gl.constexpr,
    FLAT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BASE_E: gl.constexpr,
    TENSOR_1: gl.constexpr, TENSOR_2: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
    OVERHEAD: gl.constexpr, MIN_UNITS: gl.constexpr, SCAN: gl.constexpr, ONCE: gl.constexpr, PDL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Rows and parts as `decode_kernel.decode_kernel` writes them; 16-byte aligned rows are required here."""
    DTYPE: gl.constexpr = kv_ptr.dtype.element_ty
    VEC: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # numbers in 16 bytes
    tile = gl.program_id(0) % tiles
    team = gl.program_id(0) // tiles
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, BN, R], gl.NVMMASharedLayout.get_default_for([BN, R], DTYPE))
    ropes = gl.allocate_shared_memory(
        DTYPE, [STAGES, BN, ROPE], gl.NVMMASharedLayout.get_default_for([BN, ROPE], DTYPE)
    )
    q_smem = gl.allocate_shared_memory(DTYPE, [BM, R], gl.NVMMASharedLayout.get_default_for([BM, R], DTYPE))
    q_rope_smem = gl.allocate_shared_memory(DTYPE, [BM, ROPE], gl.NVMMASharedLayout.get_default_for([BM, ROPE], DTYPE))
    NARROW: gl.constexpr = VEC == 16
    HALF: gl.constexpr = gl.float16 if NARROW else DTYPE  # of weights and values
    weight_smem = gl.allocate_shared_memory(HALF, [BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], HALF))
    bias = gl.allocate_shared_memory(gl.float32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # one arrival per loading thread and one of them all
        mbarrier.init(empty.index(i), count=2 if NARROW else 1)
    values, values_full, values_empty = keys, full, empty  # a 16-bit key holds its value
    if NARROW:
        values = gl.allocate_shared_memory(HALF, [2, BN, R], gl.NVMMASharedLayout.get_default_for([BN, R], HALF))
        values_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        values_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(values_full.index(i), count=1)
            mbarrier.init(values_empty.index(i), count=1)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    # The first page ids are wanted soon; where they stand is guessed from the share of the table.
    guess = (team.to(gl.int64) * items * width) // teams
    at = table_ptr + guess // width * stride_table_request + guess % width * stride_table
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1
    )
    total, used, item, before = locate(
        team, teams, lens_ptr, stride_lens, items, Q_LEN, SPARSE, most, PIECE, OVERHEAD, MIN_UNITS, SCAN, ONCE
    )
    lo = first_unit(team, total, used)
    hi = gl.where(team < used, first_unit(team + 1, total, used), 0)  # nothing for a team that is not used
    scale, out_scale = bmm1, bmm2
    if TENSOR_1:
        scale = gl.load(bmm1)
    if TENSOR_2:
        out_scale = gl.load(bmm2)
    scale = scale * LOG2E
    if NARROW:
        gl.warp_specialize(
            [
                (
                    compute_warps,
                    (
                        keys, ropes, values, bias, full, empty, values_full, values_empty, q_smem, q_rope_smem, weight_smem, q_ptr, lens_ptr, out_ptr, lse_ptr,
                        sinks_ptr, scale, out_scale, part_ptr, part_lse_ptr, lo, hi, item, before, tile, team,
                        stride_q_request, stride_q_token, stride_q_head, stride_lens, stride_sink, stride_out_request,
                        stride_out_token, stride_out_head, stride_lse_request, stride_lse_token, stride_lse_head, items, tiles,
                        most, Q_LEN, HEADS, SPARSE, STAGES, PIECE, OVERHEAD, BM, VEC, HAS_SINKS, HAS_LSE, BASE_E,
                    ),
                ),
                (
                    load_warps,
                    (
                        keys, ropes, bias, full, empty, kv_ptr, table_ptr, lens_ptr, lo, hi, item, before, stride_page,
                        stride_table_request, stride_table_token, stride_table, stride_lens, items, width, num_pages, most,
                        Q_LEN, PAGE, TOKEN, SPARSE, FLAT, STAGES, PIECE, OVERHEAD, VEC,
                    ),
                ),
                (
                    widen_warps,
                    (
                        keys, values, full, empty, values_full, values_empty, lens_ptr, lo, hi, item, before, stride_lens, items,
                        most, Q_LEN, SPARSE, STAGES, PIECE, OVERHEAD,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    compute_warps,
                    (
                        keys, ropes, values, bias, full, empty, values_full, values_empty, q_smem, q_rope_smem, weight_smem, q_ptr, lens_ptr, out_ptr, lse_ptr,
                        sinks_ptr, scale, out_scale, part_ptr, part_lse_ptr, lo, hi, item, before, tile, team,
                        stride_q_request, stride_q_token, stride_q_head, stride_lens, stride_sink, stride_out_request,
                        stride_out_token, stride_out_head, stride_lse_request, stride_lse_token, stride_lse_head, items, tiles,
                        most, Q_LEN, HEADS, SPARSE, STAGES, PIECE, OVERHEAD, BM, VEC, HAS_SINKS, HAS_LSE, BASE_E,
                    ),
                ),
                (
                    load_warps,
                    (
                        keys, ropes, bias, full, empty, kv_ptr, table_ptr, lens_ptr, lo, hi, item, before, stride_page,
                        stride_table_request, stride_table_token, stride_table, stride_lens, items, width, num_pages, most,
                        Q_LEN, PAGE, TOKEN, SPARSE, FLAT, STAGES, PIECE, OVERHEAD, VEC,
                    ),
                ),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
