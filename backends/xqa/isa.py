"""Every machine instruction that the kernels use: its name, its PTX, and which lane holds which number.

A kernel names an instruction as if it were a Python function of one thread. What the name means depends on where the
kernel is made to run (`specialize.py`): on a GPU it is the PTX below, inserted by Numba; in the emulator it is the
function of the same name in `emulator/lanes.py`, which computes it for all threads of a block at once.

Types: F32, U32, I32, I64, U16 are one register each; F2, F4, U2, U4 are tuples of two or four F32 or U32. In a PTX text
`<d>` is the result and `<name>` the argument of that name (`instruction.py`). Section numbers are those of the
PTX ISA, version 9.0. Lanes of a warp are counted as g = lane // 4 (0..7) and t = lane % 4 (0..3).

The three tensor-core fragments, in bytes, are the same for 16-bit and for 8-bit numbers:

    A, 16 rows x 32 bytes                 B, 32 bytes x 8 columns               C and D, 16 rows x 8 columns of F32
    a0: row g    bytes 4t..4t+3           b0: column g, bytes 4t..4t+3          c0, c1: row g    columns 2t, 2t+1
    a1: row g+8  bytes 4t..4t+3           b1: column g, bytes 16+4t..16+4t+3    c2, c3: row g+8  columns 2t, 2t+1
    a2: row g    bytes 16+4t..16+4t+3
    a3: row g+8  bytes 16+4t..16+4t+3

So a row of A or a column of B is two 16-byte chunks, and each of four lanes holds a quarter of each chunk: exactly what
`ldmatrix` hands out.
"""

from __future__ import annotations

from mla.backends.xqa.instruction import F2, F4, F32, I32, I64, U2, U4, U16, U32, by_hand, instruction

# ---- who am I -------------------------------------------------------------------------------------------------------


@instruction("mov.u32 <d>, %tid.x;")
def thread_index() -> I32:
    """The thread's number in its block. (9.2, special registers)"""


@instruction("mov.u32 <d>, %tid.x;", effect=True)
def thread_index_anew() -> I32:
    """The same, asked for again: what is computed from it is computed here, and not kept in registers from before."""


@instruction("mov.u32 <d>, %ctaid.x;", effect=True)
def block_index() -> I32:
    """The block's number in the grid. (9.2, special registers)"""


@by_hand
def shared_base() -> I32:
    """Address of the block's dynamic shared memory, in the shared window. Bound by hand: it names a symbol."""


# ---- tensor cores (9.7.14, warp-level matrix multiply-accumulate) ---------------------------------------------------


@instruction("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 <d>, <a>, <b>, <c>;")
def mma_bf16(a: U4, b: U2, c: F4) -> F4:
    """D = A B + C with 16 x 16 bf16 times 16 x 8 bf16, in fp32."""


@instruction("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 <d>, <a>, <b>, <c>;")
def mma_fp16(a: U4, b: U2, c: F4) -> F4:
    """D = A B + C with 16 x 16 fp16 times 16 x 8 fp16, in fp32."""


@instruction("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 <d>, <a>, <b>, <c>;")
def mma_e4m3(a: U4, b: U2, c: F4) -> F4:
    """D = A B + C with 16 x 32 e4m3 times 32 x 8 e4m3, in fp32. From sm_89 on."""


# ---- matrices out of shared memory (9.7.14.5, ldmatrix) -------------------------------------------------------------
#
# Each lane gives the address of one 16-byte row: lanes 0-7 of matrix 0, lanes 8-15 of matrix 1, and so on. Result i
# comes from matrix i (8 rows of 16 bytes):
#
#     plain:  lane (g, t) gets bytes 4t..4t+3 of row g                            = b0 of columns g, or a0 of rows g
#     trans:  lane (g, t) gets 16-bit number g of rows 2t (low half) and 2t+1     = b0 of columns g, k running down rows


@instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 <d>, [<address>];", effect=True)
def ldmatrix_x4(address: I32) -> U4:
    """Four 8 x 8 matrices of 16-bit numbers."""


@instruction("ldmatrix.sync.aligned.m8n8.x2.shared.b16 <d>, [<address>];", effect=True)
def ldmatrix_x2(address: I32) -> U2:
    """Two of them; the addresses of lanes 16-31 are not used."""


@instruction("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 <d>, [<address>];", effect=True)
def ldmatrix_x4_trans(address: I32) -> U4:
    """Four, each transposed on the way."""


# ---- global to shared memory, without registers (9.7.9.25, cp.async) ------------------------------------------------
#
# A copy's policy says which lines of L2 are replaced first (9.7.9.2, cache eviction priority hints). `createpolicy`
# makes one; its results stand here as numbers, as in CUTLASS (`TMA::CacheHintSm90`), so that a select can choose.

EVICT_NORMAL = 0x1000000000000000
"""Lines keep the priority that they have without a policy."""
EVICT_FIRST = 0x12F0000000000000
"""They are replaced before others: what `createpolicy.fractional.L2::evict_first.b64 <d>, 1.0` gives."""


@instruction(
    "{ .reg .pred p; setp.ne.s32 p, <active>, 0; "
    "@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [<to>], [<source>], 16, <size>, <policy>; }",
    effect=True,
)
def cp_async16(to: I32, source: I64, size: I32, active: I32, policy: I64) -> None:
    """Copy `size` (16 or 0) bytes and fill the rest of 16 with zeros; nothing at all where `active` is 0.

    policy: EVICT_NORMAL or EVICT_FIRST.
    """


@instruction("cp.async.commit_group;", effect=True)
def cp_async_commit() -> None:
    """The thread's copies since the last commit are one group; a group may be empty."""


@instruction("cp.async.wait_group 0;", effect=True)
def cp_async_wait_0() -> None:
    """Wait until all groups of this thread have landed. Others see the data after a barrier."""


@instruction("cp.async.wait_group 1;", effect=True)
def cp_async_wait_1() -> None:
    """Wait until at most the newest group is under way."""


@instruction("cp.async.wait_group 2;", effect=True)
def cp_async_wait_2() -> None:
    """Wait until at most the newest two groups are under way."""


# ---- barriers, and grids that follow each other (9.7.13) ------------------------------------------------------------


@instruction("bar.sync 0;", effect=True)
def barrier() -> None:
    """All threads of the block arrive; what they wrote to shared memory is seen by all."""


@instruction(
    "{ .reg .pred p, q; setp.ne.s32 p, <flag>, 0; bar.red.or.pred q, 0, p; selp.s32 <d>, 1, 0, q; }", effect=True
)
def barrier_any(flag: I32) -> I32:
    """A barrier that tells every thread whether any thread's flag is not 0."""


@instruction("griddepcontrol.launch_dependents;", effect=True)
def let_next_grid_start() -> None:
    """The next kernel of the stream may start, if it was launched so. From sm_90 on."""


@instruction("griddepcontrol.wait;", effect=True)
def wait_for_last_grid() -> None:
    """Wait until the kernel before this one has ended and what it wrote is seen. From sm_90 on."""


# ---- global memory (9.7.9.8 ld, 9.7.9.11 st). `ok` is 0 or not; where it is 0 nothing is touched --------------------

_PREDICATE = "{ .reg .pred p; setp.ne.s32 p, <ok>, 0; "


@instruction(_PREDICATE + "mov.b32 <d>, <otherwise>; @p ld.global.nc.s32 <d>, [<address>]; }", effect=True)
def load_i32(address: I64, ok: I32, otherwise: I32) -> I32: ...


@instruction(_PREDICATE + "mov.b32 <d>, 0; @p ld.global.nc.u32 <d>, [<address>]; }", effect=True)
def load_u32(address: I64, ok: I32) -> U32: ...


@instruction(_PREDICATE + "mov.b16 <d>, 0; @p ld.global.nc.u16 <d>, [<address>]; }", effect=True)
def load_u16(address: I64, ok: I32) -> U16: ...


@instruction(_PREDICATE + "mov.b16 <d>, 0; @p ld.global.nc.u8 <d>, [<address>]; }", effect=True)
def load_u8(address: I64, ok: I32) -> U16: ...


@instruction(_PREDICATE + "mov.b32 <d>, <otherwise>; @p ld.global.nc.f32 <d>, [<address>]; }", effect=True)
def load_f32(address: I64, ok: I32, otherwise: F32) -> F32: ...


@instruction("ld.global.s32 <d>, [<address>];", effect=True)
def load_fresh_i32(address: I64) -> I32:
    """Not through the read-only cache: an earlier kernel may still be writing when this one starts."""


@instruction(_PREDICATE + "mov.b32 <d>, <otherwise>; @p ld.global.f32 <d>, [<address>]; }", effect=True)
def load_fresh_f32(address: I64, ok: I32, otherwise: F32) -> F32: ...


@instruction(
    _PREDICATE + "mov.b32 <d0>, 0; mov.b32 <d1>, 0; mov.b32 <d2>, 0; mov.b32 <d3>, 0; "
    "@p ld.global.v4.f32 <d>, [<address>]; }",
    effect=True,
)
def load_fresh_f32x4(address: I64, ok: I32) -> F4: ...


@instruction(_PREDICATE + "@p prefetch.global.L2 [<address>]; }", effect=True)
def prefetch(address: I64, ok: I32) -> None:
    """Bring the line of L2 that holds this byte, and wait for nothing. (9.7.9.16)"""


@instruction(_PREDICATE + "@p st.global.s32 [<address>], <value>; }", effect=True)
def store_i32(address: I64, value: I32, ok: I32) -> None: ...


@instruction(_PREDICATE + "@p st.global.f32 [<address>], <value>; }", effect=True)
def store_f32(address: I64, value: F32, ok: I32) -> None: ...


@instruction(_PREDICATE + "@p st.global.v2.f32 [<address>], <value>; }", effect=True)
def store_f32x2(address: I64, value: F2, ok: I32) -> None: ...


@instruction(_PREDICATE + "@p st.global.u32 [<address>], <value>; }", effect=True)
def store_u32(address: I64, value: U32, ok: I32) -> None: ...


@instruction(
    _PREDICATE + ".reg .b16 lo, hi; mov.b32 {lo, hi}, <value>; @p st.global.u16 [<address>], lo; }",
    effect=True,
)
def store_u16(address: I64, value: U32, ok: I32) -> None:
    """The low half of `value`."""


# ---- shared memory ---------------------------------------------------------------------------------------------------


@instruction("ld.shared.f32 <d>, [<address>];", effect=True)
def shared_f32(address: I32) -> F32: ...


@instruction("ld.shared.v2.f32 <d>, [<address>];", effect=True)
def shared_f32x2(address: I32) -> F2: ...


@instruction("ld.shared.v4.f32 <d>, [<address>];", effect=True)
def shared_f32x4(address: I32) -> F4: ...


@instruction("ld.shared.u32 <d>, [<address>];", effect=True)
def shared_u32(address: I32) -> U32: ...


@instruction("ld.shared.s32 <d>, [<address>];", effect=True)
def shared_i32(address: I32) -> I32: ...


@instruction("ld.shared.u16 <d>, [<address>];", effect=True)
def shared_u16(address: I32) -> U16: ...


@instruction(_PREDICATE + "@p st.shared.f32 [<address>], <value>; }", effect=True)
def set_shared_f32(address: I32, value: F32, ok: I32) -> None: ...


@instruction("st.shared.v2.f32 [<address>], <value>;", effect=True)
def set_shared_f32x2(address: I32, value: F2) -> None: ...


@instruction("st.shared.v4.f32 [<address>], <value>;", effect=True)
def set_shared_f32x4(address: I32, value: F4) -> None: ...


@instruction("st.shared.u32 [<address>], <value>;", effect=True)
def set_shared_u32(address: I32, value: U32) -> None: ...


@instruction("st.shared.v2.u32 [<address>], <value>;", effect=True)
def set_shared_u32x2(address: I32, value: U2) -> None: ...


@instruction(_PREDICATE + "@p st.shared.s32 [<address>], <value>; }", effect=True)
def set_shared_i32(address: I32, value: I32, ok: I32) -> None: ...


@instruction(_PREDICATE + "@p st.shared.v4.u32 [<address>], <value>; }", effect=True)
def set_shared_u32x4(address: I32, value: U4, ok: I32) -> None: ...


# ---- between lanes (9.7.9.6, shfl) ----------------------------------------------------------------------------------


@instruction("shfl.sync.bfly.b32 <d>, <value>, <mask>, 31, 0xffffffff;", effect=True)
def shuffle_xor(value: F32, mask: I32) -> F32:
    """The value of lane `lane ^ mask`."""


@instruction("shfl.sync.up.b32 <d>, <value>, <distance>, 0, 0xffffffff;", effect=True)
def shuffle_up(value: I32, distance: I32) -> I32:
    """The value of lane `lane - distance`; lanes without one keep their own."""


# ---- over a warp (9.7.13, redux) -------------------------------------------------------------------------------------


@instruction("redux.sync.add.s32 <d>, <value>, 0xffffffff;", effect=True)
def warp_sum(value: I32) -> I32:
    """The sum over the 32 lanes, in each of them."""


@instruction(
    "{ .reg .b32 x, s; mov.b32 x, <value>; shr.s32 s, x, 31; and.b32 s, s, 0x7fffffff; xor.b32 x, x, s; "
    "redux.sync.max.s32 x, x, 0xffffffff; shr.s32 s, x, 31; and.b32 s, s, 0x7fffffff; xor.b32 x, x, s; "
    "mov.b32 <d>, x; }",
    effect=True,
)
def warp_max(value: F32) -> F32:
    """The largest over the 32 lanes, in each of them; none of them is NaN. Bits of fp32 numbers are in the order of
    the numbers, as signed integers, when those of negative ones are turned over."""


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@instruction("ex2.approx.ftz.f32 <d>, <x>;")
def exp2(x: F32) -> F32:
    """2 to the x; 0 at minus infinity. (9.7.3)"""


@instruction("lg2.approx.ftz.f32 <d>, <x>;")
def log2(x: F32) -> F32:
    """Minus infinity at 0. (9.7.3)"""


@instruction("div.rn.f32 <d>, <x>, <y>;")
def divide(x: F32, y: F32) -> F32:
    """x / y, correctly rounded. (9.7.3)"""


@instruction("max.f32 <d>, <x>, <y>;")
def larger(x: F32, y: F32) -> F32:
    """The larger of two; of a number and a NaN the number. (9.7.3)"""


@instruction("div.u32 <d>, <x>, <y>;")
def quotient(x: I32, y: I32) -> I32:
    """x // y of two that are not negative. (9.7.1)"""


@instruction("mul.hi.u32 <d>, <x>, <y>;")
def high_product(x: I32, y: I32) -> I32:
    """The upper 32 bits of the product of two unsigned numbers. (9.7.1)"""


@instruction("prmt.b32 <d>, <x>, <y>, <selector>;")
def permute(x: U32, y: U32, selector: U32) -> U32:
    """Four bytes chosen out of eight (x is 0-3, y is 4-7), one hexadecimal digit each, the lowest first. (9.7.9.7)"""


# ---- number formats (9.7.9.22, cvt) ---------------------------------------------------------------------------------


@instruction("cvt.rn.bf16x2.f32 <d>, <high>, <low>;")
def pack_bf16(low: F32, high: F32) -> U32:
    """Two rounded to bf16, `low` in bits 0-15."""


@instruction("cvt.rn.f16x2.f32 <d>, <high>, <low>;")
def pack_fp16(low: F32, high: F32) -> U32:
    """Two rounded to fp16, `low` in bits 0-15."""


@instruction("mov.b32 <d>, <bits>;")
def float_of_bits(bits: U32) -> F32:
    """The fp32 number with these bits; a bf16 number is the upper half of one."""


@instruction("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, <x>; cvt.f32.f16 <d>, lo; }")
def low_fp16(x: U32) -> F32:
    """The fp16 number in bits 0-15."""


@instruction("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, <x>; cvt.f32.f16 <d>, hi; }")
def high_fp16(x: U32) -> F32:
    """The fp16 number in bits 16-31."""


@instruction("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, <x>; cvt.rn.f16x2.e4m3x2 <d>, lo; }")
def low_e4m3_to_fp16(x: U32) -> U32:
    """The e4m3 numbers in bytes 0 and 1 as two fp16: exact. From sm_89 on."""


@instruction("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, <x>; cvt.rn.f16x2.e4m3x2 <d>, hi; }")
def high_e4m3_to_fp16(x: U32) -> U32:
    """The e4m3 numbers in bytes 2 and 3 as two fp16: exact. From sm_89 on."""
