"""The merge kernel: parts of the items that the plan cut become rows. Items that were not cut are left alone."""

import triton
import triton.language as tl

from mla.backends.trtllm_gen.decode_kernel import LN2, LOG2E, R, read_scale
from mla.backends.trtllm_gen.plan_kernel import keys_of, locate, owner_of, pieces_in, units_before


@triton.jit(
    do_not_specialize=[
        "bmm2", "stride_lens", "stride_sink", "stride_out_request", "stride_out_token", "stride_out_head",
        "stride_lse_request", "stride_lse_token", "stride_lse_head", "items", "teams", "tiles", "most",
    ],
    do_not_specialize_on_alignment=["lens_ptr", "lse_ptr", "sinks_ptr", "bmm2"]
)  # fmt: skip
def merge_kernel(
    part_ptr, part_lse_ptr, lens_ptr, out_ptr, lse_ptr, sinks_ptr, bmm2, stride_lens: tl.int64, stride_sink: tl.int64,
    stride_out_request: tl.int64, stride_out_token: tl.int64, stride_out_head: tl.int64,
    stride_lse_request: tl.int64, stride_lse_token: tl.int64, stride_lse_head: tl.int64,
    items: tl.int32, teams: tl.int32, tiles: tl.int32, most: tl.int32,
    Q_LEN: tl.constexpr, HEADS: tl.constexpr, SPARSE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    BASE_E: tl.constexpr, TENSOR_2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr,
    OVERHEAD: tl.constexpr, MIN_UNITS: tl.constexpr, SCAN: tl.constexpr, ONCE: tl.constexpr, PARTS: tl.constexpr, MR: tl.constexpr, MC: tl.constexpr,
    BY_TEAM: tl.constexpr, OUT_ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """MR rows of one item, MC of their R columns, PARTS parts at a time.

    Grid: (items or teams) * ceil(rows / MR) * (R / MC). With fewer teams than items (BY_TEAM) there is a program per team: the team
    that ends a cut item merges it, and it ends at most one that it did not begin.
    """
    ROWS: tl.constexpr = HEADS if SPARSE else Q_LEN * HEADS
    CHUNKS: tl.constexpr = R // MC
    pid = tl.program_id(0)
    GROUPS: tl.constexpr = (ROWS + MR - 1) // MR
    cols = (pid % CHUNKS) * MC + tl.arange(0, MC)  # [MC]
    row = (pid // CHUNKS % GROUPS) * MR + tl.arange(0, MR)  # [MR]
    row_live = row < ROWS
    index = pid // CHUNKS // GROUPS
    if BY_TEAM:
        _, line, sharing, item, before = locate(
            index, teams, lens_ptr, stride_lens, items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD, MIN_UNITS, SCAN, ONCE
        )
    else:
        item = index
        _, line, sharing, before = units_before(
            item, teams, lens_ptr, stride_lens, items, Q_LEN, SPARSE, most, BN, PIECE, OVERHEAD, MIN_UNITS, SCAN
        )
    keys, _ = keys_of(lens_ptr, stride_lens, item, item < items, Q_LEN, SPARSE, most)
    _, pieces = pieces_in(keys, BN, PIECE)
    if PIECE:
        parts = pieces
        merges = parts > 1
        first_team = 0
    else:
        first_team = owner_of(before + OVERHEAD, line, sharing)
        last_team = owner_of(before + OVERHEAD + pieces - 1, line, sharing)
        parts = last_team - first_team + 1
        merges = parts > 1
        if BY_TEAM:
            merges = merges & (last_team == index)
    if PDL:
        tl.extra.cuda.gdc_wait()  # the parts are written now
    if merges & (item < items):
        tile = row // BM
        top = tl.full([MR], float("-inf"), tl.float32)
        weight = tl.zeros([MR], tl.float32)
        acc = tl.zeros([MR, MC], tl.float32)
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)
            if PIECE:
                slot = (before + part).to(tl.int64)
            else:
                slot = ((first_team + part) * 2 + (part == 0).to(tl.int32)).to(tl.int64)
            part_row = (slot[:, None] * tiles + tile[None, :]) * BM + (row % BM)[None, :]  # [PARTS, MR]
            live = (part < parts)[:, None] & row_live[None, :]
            lse = tl.load(part_lse_ptr + part_row, mask=live, other=float("-inf"))
            at = part_ptr + part_row[:, :, None] * R + cols[None, None, :]
            value = tl.load(at, mask=live[:, :, None], other=0.0)  # [PARTS, MR, MC]
            new_top = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            share = tl.exp2(lse - base[None, :])  # [PARTS, MR]
            rescale = tl.exp2(top - base)
            acc = acc * rescale[:, None] + tl.sum(value * share[:, :, None], 0)
            weight = weight * rescale + tl.sum(share, 0)
            top = new_top
        head = row % HEADS
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head.to(tl.int64) * stride_sink, mask=row_live, other=0.0) * LOG2E
            new_top = tl.maximum(top, sink)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2(top - base)
            acc = acc * rescale[:, None]
            weight = weight * rescale + tl.exp2(sink - base)
            top = new_top
        if SPARSE:
            request = item // Q_LEN
            token = tl.zeros([MR], tl.int32) + item % Q_LEN
        else:
            request = item
            token = row // HEADS
        request, token, head = request.to(tl.int64), token.to(tl.int64), head.to(tl.int64)
        factor = tl.where(weight == 0.0, 0.0, 1.0 / weight) * read_scale(bmm2, TENSOR_2)
        result = (acc * factor[:, None]).to(out_ptr.dtype.element_ty)
        out_row = request * stride_out_request + token * stride_out_token + head * stride_out_head
        out_at = out_ptr + tl.multiple_of(out_row, OUT_ALIGN)[:, None] + cols[None, :]
        tl.store(out_at, result, mask=row_live[:, None])
        if HAS_LSE and pid % CHUNKS == 0:
            lse_row = request * stride_lse_request + token * stride_lse_token + head * stride_lse_head
            log = tl.where(top == float("-inf"), 0.0, top) + tl.log2(weight)
            tl.store(lse_ptr + lse_row, log * LN2 if BASE_E else log, mask=row_live)
