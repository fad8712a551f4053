"""The decode kernel of Hopper chips, in Gluon: the same plan, the same results, every warp in its place.

One group of warps loads blocks of 64 keys into a ring in shared memory, the others compute. A block that fills a page, or
a part of one, is copied as a box by the engine for that (TMA), others row by row, so that every page size, stride and list
of slots will do. Tiles of 16 and 32 rows swap the operands, S^T = K Q^T and O^T = V^T P^T, which gives the 64 keys to the
64 rows of the tensor cores' instruction; tiles of 64 rows need not.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla.backends.trtllm_gen.decode_kernel import LOG2E
from mla.backends.trtllm_gen.hopper_computing_kernel import compute_warps
from mla.backends.trtllm_gen.hopper_loading_kernel import (
    BN,
    ROPE,
    R,
    first_unit,
    load_warps,
    locate,
)


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
    latent_map, rope_map,
    Q_LEN: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, TOKEN: gl.constexpr, SPARSE: gl.constexpr,
    FLAT: gl.constexpr, BOXES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, BASE_E: gl.constexpr,
    TENSOR_1: gl.constexpr, TENSOR_2: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
    OVERHEAD: gl.constexpr, MIN_UNITS: gl.constexpr, SCAN: gl.constexpr, ONCE: gl.constexpr, PDL: gl.constexpr,
    Q_PLACES: gl.constexpr, V_KEYS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Rows and parts as `decode_kernel.decode_kernel` writes them; 16-byte aligned rows are required here.

    `latent_map` and `rope_map`, with BOXES, are what `tensor_maps` makes of the pool; else None.
    """
    DTYPE: gl.constexpr = kv_ptr.dtype.element_ty
    VEC: gl.constexpr = 128 // DTYPE.primitive_bitwidth  # numbers in 16 bytes
    tile = gl.program_id(0) % tiles
    team = gl.program_id(0) // tiles
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, BN, R], gl.NVMMASharedLayout.get_default_for([BN, R], DTYPE))
    ropes = gl.allocate_shared_memory(
        DTYPE, [STAGES, BN, ROPE], gl.NVMMASharedLayout.get_default_for([BN, ROPE], DTYPE)
    )
    queries = gl.allocate_shared_memory(DTYPE, [Q_PLACES, BM, R], gl.NVMMASharedLayout.get_default_for([BM, R], DTYPE))
    query_ropes = gl.allocate_shared_memory(
        DTYPE, [Q_PLACES, BM, ROPE], gl.NVMMASharedLayout.get_default_for([BM, ROPE], DTYPE)
    )
    NARROW: gl.constexpr = VEC == 16
    HALF: gl.constexpr = gl.float16 if NARROW else DTYPE  # of weights and values
    weight_smem = gl.allocate_shared_memory(HALF, [BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], HALF))
    bias = gl.allocate_shared_memory(gl.float32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # one arrival per loading thread and one of them all
        mbarrier.init(empty.index(i), count=1)
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
    used, line, sharing, item, before = locate(
        team, teams, lens_ptr, stride_lens, items, Q_LEN, SPARSE, most, PIECE, OVERHEAD, MIN_UNITS, SCAN, ONCE
    )
    lo = first_unit(team, line, sharing)
    hi = gl.where(team < used, first_unit(team + 1, line, sharing), 0)  # nothing for a team that is not used
    scale, out_scale = bmm1, bmm2
    if TENSOR_1:
        scale = gl.load(bmm1)
    if TENSOR_2:
        out_scale = gl.load(bmm2)
    scale = scale * LOG2E
    # The compiler (Triton 3.6) writes what it hands over to where the plan's last sum stood, while slower warps may still
    # read that. Without this barrier a warp now and then walked other blocks than the rest, which waited for it for ever.
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                compute_warps,
                (
                    keys, ropes, bias, full, empty, queries, query_ropes, weight_smem, q_ptr, lens_ptr, out_ptr, lse_ptr,
                    sinks_ptr, scale, out_scale, part_ptr, part_lse_ptr, lo, hi, item, before, tile, team,
                    stride_q_request, stride_q_token, stride_q_head, stride_lens, stride_sink, stride_out_request,
                    stride_out_token, stride_out_head, stride_lse_request, stride_lse_token, stride_lse_head, items, tiles,
                    most, Q_PLACES, V_KEYS, Q_LEN, HEADS, SPARSE, STAGES, PIECE, OVERHEAD, BM, VEC, HAS_SINKS, HAS_LSE, BASE_E,
                ),
            ),
            (
                load_warps,
                (
                    keys, ropes, bias, full, empty, kv_ptr, latent_map, rope_map, table_ptr, lens_ptr, lo, hi, item, before,
                    stride_page, stride_table_request, stride_table_token, stride_table, stride_lens, items, width,
                    num_pages, most, Q_LEN, PAGE, TOKEN, SPARSE, FLAT, BOXES, STAGES, PIECE, OVERHEAD, VEC,
                ),
            ),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
