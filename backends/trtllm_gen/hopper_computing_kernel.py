"""The computing warps of Hopper's decode kernel, in Gluon: scores, softmax, values, and the rows at the end."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla.backends.trtllm_gen import decode_kernel
from mla.backends.trtllm_gen.decode_kernel import LN2
from mla.backends.trtllm_gen.hopper_loading_kernel import BN, ROPE, R, span_of, without_odd

finish_rows = gluon.jit(decode_kernel.finish_rows.fn)


@gluon.jit
def rows_at(
    item, row, stride_request, stride_token, stride_head, Q_LEN: gl.constexpr, HEADS: gl.constexpr, SPARSE: gl.constexpr
):
    """Where rows of an item begin in a tensor [B, Q, H, ...], in elements.

    The portable kernels write this out: of a function's result, Triton 3.6 does not keep that it is said to be aligned.
    """
    if SPARSE:
        at = (item // Q_LEN).to(gl.int64) * stride_request + (item % Q_LEN).to(gl.int64) * stride_token
    else:
        at = item.to(gl.int64) * stride_request + (row // HEADS).to(gl.int64) * stride_token
    return at + (row % HEADS).to(gl.int64) * stride_head


@gluon.jit
def load_queries(
    item, tile, queries, query_ropes, q_ptr, stride_q_request, stride_q_token, stride_q_head, Q_LEN: gl.constexpr,
    HEADS: gl.constexpr, SPARSE: gl.constexpr, BM: gl.constexpr, VEC: gl.constexpr,
):  # fmt: skip
    """Start to copy the query vectors of a row tile of an item; zeros past the last row."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = HEADS if SPARSE else Q_LEN * HEADS
    WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, VEC], [VEC // 2, 64 // VEC], [WARPS, 1], [1, 0])
    row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    at = rows_at(item, row, stride_q_request, stride_q_token, stride_q_head, Q_LEN, HEADS, SPARSE)
    at = gl.multiple_of(q_ptr + at, 16)[:, None] + gl.arange(0, R, gl.SliceLayout(0, WIDE))[None, :]
    async_copy.async_copy_global_to_shared(queries, at, mask=(row < ROWS)[:, None])
    row = tile * BM + gl.arange(0, BM, gl.SliceLayout(1, NARROW))
    at = rows_at(item, row, stride_q_request, stride_q_token, stride_q_head, Q_LEN, HEADS, SPARSE)
    at = gl.multiple_of(q_ptr + at, 16)[:, None] + (R + gl.arange(0, ROPE, gl.SliceLayout(0, NARROW)))[None, :]
    async_copy.async_copy_global_to_shared(query_ropes, at, mask=(row < ROWS)[:, None])
    async_copy.commit_group()


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
def widened(keys, START: gl.constexpr, COUNT: gl.constexpr, PRODUCT: gl.constexpr):
    """Values of `COUNT` e4m3 keys of a block as fp16, exactly: (even columns [R / 2, keys], odd columns [R / 2, keys]).

    Two columns of a key are read as one 16-bit number, since numbers of 8 bits can't be read across keys.
    """
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    some = keys._reinterpret(gl.int16, [BN, R // 2], PAIRS).slice(START, COUNT, 0)
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
        }""",
        "=r,=r,r", [some.permute((1, 0)).load(gl.DotOperandLayout(0, PRODUCT, 2))], dtype=(gl.float16, gl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def add_widened_values(keys, p, weight_smem, even, odd, empty, PRODUCT: gl.constexpr, V_KEYS: gl.constexpr):
    """Even and odd columns [R / 2, BM] plus p . values for a block of e4m3 keys, whose place is free once they are read.

    Tiles of 64 rows widen the next `V_KEYS` keys while products are under way; others have no registers to gain by it.
    """
    UNDER_WAY: gl.constexpr = 2 if p.shape[1] == 64 else 0
    LAST: gl.constexpr = BN // V_KEYS - 1
    weight_smem.store(p.to(weight_smem.dtype))
    fence_async_shared()
    for part in gl.static_range(LAST + 1):
        even_values, odd_values = widened(keys, part * V_KEYS, V_KEYS, PRODUCT)
        if part == LAST:
            mbarrier.arrive(empty, count=1)
        some = weight_smem.slice(part * V_KEYS, V_KEYS, 0)
        even = warpgroup_mma(even_values, some, even, is_async=True)
        odd = warpgroup_mma(odd_values, some, odd, is_async=True)
        even, odd = warpgroup_mma_wait(UNDER_WAY if part < LAST else 0, deps=[even, odd])
    return even, odd


@gluon.constexpr_function
def store_layout(layout, SWAP):
    """`layout`, in which the tensor cores leave rows, with one bit of the column exchanged between lanes and registers.

    Twice as many columns of a row are then together in a thread, and 32 bytes of bf16 or more in a warp: L2 takes whole
    sectors. One exchange is what the compiler does by shuffles alone; with more it goes through shared memory.
    """
    axis = 0 if SWAP else 1
    lanes, registers = list(layout.lane_bases), list(layout.reg_bases)
    lane = min((base for base in lanes if base[axis]), key=sum)
    register = min((base for base in registers if base[axis] > lane[axis]), key=sum)
    lanes[lanes.index(lane)] = register
    registers.remove(register)
    together = [base for base in registers if 0 < base[axis] < lane[axis]] + [lane]
    registers = together + [base for base in registers if base not in together]
    return gl.DistributedLinearLayout(registers, lanes, layout.warp_bases, layout.block_bases, layout.shape)


@gluon.jit
def side_by_side(even, odd, BM: gl.constexpr):
    """Even and odd columns [R / 2, BM] as columns [R, BM], every number where it is."""
    return gl.join(even, odd).permute((0, 2, 1)).reshape([R, BM])


@gluon.jit
def clear_odd(keys, bias, start, late, VEC: gl.constexpr):
    """Clear numbers of late keys that are not finite, as `without_odd` says; NaN joins the scores of such keys."""
    PART: gl.constexpr = 16
    WIDE: gl.constexpr = gl.BlockedLayout([1, VEC], [1, 32], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(BN // PART):
        if start + part * PART + PART > late:
            some, some_bias = keys.slice(part * PART, PART, 0), bias.slice(part * PART, PART, 0)
            value, odd = without_odd(some.load(WIDE), start + part * PART, late, WIDE, PART)
            joins = some_bias.load(gl.SliceLayout(1, WIDE))
            gl.thread_barrier()
            some.store(value)
            some_bias.store(gl.where(odd, float("nan"), joins))
    gl.thread_barrier()
    fence_async_shared()


@gluon.jit
def compute_warps(
    keys, ropes, bias, full, empty, queries, query_ropes, weight_smem, q_ptr, lens_ptr, out_ptr, lse_ptr, sinks_ptr, scale,
    out_scale, part_ptr, part_lse_ptr, lo, hi, item, before, tile, team,
    stride_q_request, stride_q_token, stride_q_head, stride_lens, stride_sink, stride_out_request, stride_out_token,
    stride_out_head, stride_lse_request, stride_lse_token, stride_lse_head, items, tiles, most, Q_PLACES: gl.constexpr, V_KEYS: gl.constexpr,
    Q_LEN: gl.constexpr, HEADS: gl.constexpr, SPARSE: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
    OVERHEAD: gl.constexpr, BM: gl.constexpr, VEC: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    BASE_E: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and values of every block in the order of the ring, rows or parts at the end of each piece.

    With two places for queries, those of the next item are asked for before the blocks of this one are computed.
    """
    NARROW: gl.constexpr = VEC == 16  # e4m3
    SWAP: gl.constexpr = NARROW or BM < 64
    WARPS: gl.constexpr = gl.num_warps()
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, (BM if SWAP else BN) * 4 // WARPS, 2 * VEC]
    )
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(  # of values: [R, BM], [BM, R], or one of two halves [R / 2, BM]
        [3, 0], [WARPS, 1] if SWAP else [4, WARPS // 4], [16, BM if SWAP else R * 4 // WARPS, 16]
    )
    half = gl.zeros([R // 2, BM], gl.float32, PRODUCT)
    ACC: gl.constexpr = side_by_side(half, half, BM).type.layout if NARROW else PRODUCT
    KEYS: gl.constexpr = 0 if SWAP else 1  # the axis of keys (and of columns)
    PER_ROW: gl.constexpr = gl.SliceLayout(KEYS, SCORE)
    ACC_ROW: gl.constexpr = gl.SliceLayout(KEYS, ACC)
    ROWS: gl.constexpr = HEADS if SPARSE else Q_LEN * HEADS
    CAUSAL: gl.constexpr = (not SPARSE) and Q_LEN > 1
    STORE: gl.constexpr = store_layout(gl.to_linear_layout(ACC, [R, BM] if SWAP else [BM, R]), SWAP)
    row = tile * BM + gl.arange(0, BM, PER_ROW)
    out_row = tile * BM + gl.arange(0, BM, ACC_ROW)
    offsets = gl.arange(0, BN, gl.SliceLayout(1 - KEYS, SCORE))
    count, turn = gl.to_tensor(0), gl.to_tensor(0)
    if Q_PLACES == 2:
        if before < hi:
            load_queries(
                item, tile, queries.index(0), query_ropes.index(0), q_ptr, stride_q_request, stride_q_token, stride_q_head,
                Q_LEN, HEADS, SPARSE, BM, VEC,
            )  # fmt: skip
    while before < hi:
        here, length, blocks, pieces, first, last = span_of(
            item, before, lo, hi, lens_ptr, stride_lens, items, most, Q_LEN, SPARSE, PIECE, OVERHEAD
        )
        if Q_PLACES == 1:
            load_queries(
                item, tile, queries.index(0), query_ropes.index(0), q_ptr, stride_q_request, stride_q_token,
                stride_q_head, Q_LEN, HEADS, SPARSE, BM, VEC,
            )  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        q_smem, q_rope_smem = queries.index(turn % Q_PLACES), query_ropes.index(turn % Q_PLACES)
        if Q_PLACES == 2:
            if before + pieces + OVERHEAD < hi:
                load_queries(
                    item + 1, tile, queries.index((turn + 1) % 2), query_ropes.index((turn + 1) % 2), q_ptr,
                    stride_q_request, stride_q_token, stride_q_head, Q_LEN, HEADS, SPARSE, BM, VEC,
                )  # fmt: skip
        turn += 1
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
                even, odd = half, half
            else:
                weights = gl.zeros([BM, BN], gl.float32, SCORE)
                acc = gl.zeros([BM, R], gl.float32, ACC)
            for block in range(begin, gl.minimum(end, gl.cdiv(here, BN))):
                place = count % STAGES
                mbarrier.wait(full.index(place), (count // STAGES) & 1)
                fence_async_shared()
                if CAUSAL:
                    if block * BN + BN > length - Q_LEN + 1:
                        clear_odd(keys.index(place), bias.index(place), block * BN, length - Q_LEN + 1, VEC)
                joins = bias.index(place).load(gl.SliceLayout(1 - KEYS, SCORE))
                raw = scores_of(keys.index(place), ropes.index(place), q_smem, q_rope_smem, SCORE, BM, SWAP)
                s = raw * scale + per_key(joins, SWAP)
                if CAUSAL:
                    if block * BN + BN > length - Q_LEN + 1:
                        seen = per_key(block * BN + offsets, SWAP) <= per_row(length - Q_LEN + row // HEADS, SWAP)
                        s = gl.where(seen, s, float("-inf"))
                p, rescale, m = softmax_step(s, m, KEYS, SWAP)
                weights = weights * per_row(rescale, SWAP) + p
                if NARROW:
                    rescale = per_row(gl.convert_layout(rescale, gl.SliceLayout(0, PRODUCT)), SWAP)
                    even, odd = even * rescale, odd * rescale
                    even, odd = add_widened_values(
                        keys.index(place), p, weight_smem, even, odd, empty.index(place), PRODUCT, V_KEYS
                    )  # fmt: skip
                else:
                    acc = acc * per_row(gl.convert_layout(rescale, ACC_ROW), SWAP)
                    acc = add_values(keys.index(place), p, weight_smem, acc, ACC, SWAP)
                    mbarrier.arrive(empty.index(place), count=1)
                count += 1
            if NARROW:
                acc = side_by_side(even, odd, BM)
            m = gl.convert_layout(m, ACC_ROW)
            weight = gl.convert_layout(gl.sum(weights, KEYS), ACC_ROW)  # [BM]
            if (begin == 0) & (end == blocks):
                live = out_row < ROWS
                factor, lse = finish_rows(m, weight, out_row % HEADS, live, sinks_ptr, stride_sink, HAS_SINKS)
                result = (acc * per_row(factor * out_scale, SWAP)).to(out_ptr.dtype.element_ty)
                stored_row = tile * BM + gl.arange(0, BM, gl.SliceLayout(KEYS, STORE))
                stored_cols = gl.arange(0, R, gl.SliceLayout(1 - KEYS, STORE))
                at = rows_at(
                    item, stored_row, stride_out_request, stride_out_token, stride_out_head, Q_LEN, HEADS, SPARSE
                )
                at = per_row(gl.multiple_of(out_ptr + at, 16), SWAP) + per_key(stored_cols, SWAP)
                gl.store(at, gl.convert_layout(result, STORE), mask=per_row(stored_row < ROWS, SWAP))
                if HAS_LSE:
                    if BASE_E:
                        lse = lse * LN2
                    at = rows_at(
                        item, out_row, stride_lse_request, stride_lse_token, stride_lse_head, Q_LEN, HEADS, SPARSE
                    )
                    gl.store(lse_ptr + at, lse, mask=live)
            else:
                if PIECE:
                    slot = (before + piece).to(gl.int64)
                else:
                    slot = (team * 2 + (begin == 0).to(gl.int32)).to(gl.int64)
                ends = gl.where(weight == 0.0, 0.0, 1.0 / weight)
                part_row = (slot * tiles + tile) * BM + gl.arange(0, BM, ACC_ROW)
                cols = gl.arange(0, R, gl.SliceLayout(1 - KEYS, ACC))
                gl.store(part_ptr + per_row(part_row, SWAP) * R + per_key(cols, SWAP), acc * per_row(ends, SWAP))
                gl.store(part_lse_ptr + part_row, gl.where(m == float("-inf"), 0.0, m) + gl.log2(weight))
        before += pieces + OVERHEAD
        item += 1
