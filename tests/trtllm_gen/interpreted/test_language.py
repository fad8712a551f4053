"""What kernels use of Triton's language means in the interpreter what it means on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

THREE = tl.constexpr(3)


@triton.jit
def loops_kernel(lo_ptr, out, HI: tl.constexpr):
    lo = tl.load(lo_ptr)
    by_range = tl.zeros([], tl.int64)
    for i in range(lo, HI, 2):
        by_range += i.to(tl.int64)
    by_tl_range = 0
    for i in tl.range(lo, lo + HI, num_stages=2):
        by_tl_range += i
    by_while = 0
    item = lo
    while item * item < HI:
        item += 1
        by_while += item
    by_static = 0
    for i in tl.static_range(THREE):
        for j in tl.static_range(1, 4, step=2):
            by_static += i * j
    nothing = 7
    for i in range(lo, lo - 1):
        nothing += i
    tl.store(out, by_range)
    tl.store(out + 1, by_tl_range)
    tl.store(out + 2, by_while)
    tl.store(out + 3, by_static)
    tl.store(out + 4, nothing)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_loops_take_run_time_bounds_and_their_variable_is_a_tensor(dtype: torch.dtype) -> None:
    out = torch.empty(5, dtype=dtype)
    loops_kernel[(1,)](torch.tensor([3], dtype=dtype), out, HI=20)
    assert out.tolist() == [sum(range(3, 20, 2)), sum(range(3, 23)), 4 + 5, (0 + 1 + 2) * (1 + 3), 7]


@triton.jit
def grid_kernel(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + at, tl.cdiv(at + 1, 3) + tl.num_programs(0) * 1000)


def test_programs_know_their_place() -> None:
    out = torch.empty(2, 3, 4, dtype=torch.int32)
    grid_kernel[(2, 3, 4)](out)
    assert out.flatten().tolist() == [2000 + -(-(at + 1) // 3) for at in range(24)]


@triton.jit
def table_kernel(table, source, out, n, COLS: tl.constexpr):
    row, col = tl.arange(0, 4), tl.arange(0, COLS)
    live = row < n
    page = tl.load(table + row, mask=live, other=-1).to(tl.int64)
    live &= page >= 0
    live = live & ((n > 0) & (n < 1000))  # one condition for all rows
    where = tl.multiple_of(page * (1 << 40), 16)  # far outside of everything, unless the page is 0
    values = tl.load(source + where[:, None] + tl.max_contiguous(col, COLS)[None, :], mask=live[:, None], other=-5.0)
    tl.store(out + row[:, None] * COLS + col[None, :], values, mask=(row < 3)[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_what_a_mask_hides_is_never_touched(dtype: torch.dtype) -> None:
    table = torch.tensor([0, -1, 1 << 20, 1 << 20], dtype=torch.int32)
    source = torch.arange(8.0).to(dtype)
    out = torch.full((4, 8), 9.0).to(dtype)
    table_kernel[(1,)](table, source, out, 2, COLS=8)
    expected = torch.stack([torch.arange(8.0), torch.full((8,), -5.0), torch.full((8,), -5.0), torch.full((8,), 9.0)])
    assert torch.equal(out.float(), expected)


@triton.jit
def undefined_kernel(source, out):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(source + at, mask=at < 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32], ids=str)
def test_what_a_masked_load_leaves_out_shows(dtype: torch.dtype) -> None:
    out = torch.zeros(4).to(dtype)
    undefined_kernel[(1,)](torch.ones(4).to(dtype), out)
    assert out[:2].float().tolist() == [1, 1]
    assert out[2:].tolist() == [-1, -1] if dtype is torch.int32 else out[2:].isnan().all()


@triton.jit
def halves(x, OFFSET: tl.constexpr = 0):
    """(half of it, the sum of it)."""
    return x * 0.5 + OFFSET, tl.sum(x, 0)


@triton.jit
def first_or_second(x, FIRST: tl.constexpr):
    if FIRST:
        return x
    half, total = halves(x, OFFSET=1)
    return half + total


@triton.jit
def helper_kernel(source, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(source + at)
    half, total = halves(x)
    even: tl.constexpr = N % 2 == 0
    tl.store(out + at, half + total + first_or_second(x, even))
    tl.store(out + N + at, first_or_second(x, False))


def test_helpers_return_tuples_and_take_constants() -> None:
    source, out = torch.arange(8.0), torch.empty(16)
    helper_kernel[(1,)](source, out, N=8)
    assert torch.equal(out[:8], source * 1.5 + 28)
    assert torch.equal(out[8:], source * 0.5 + 1 + 28)


@triton.jit
def shape_kernel(source, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(source + at)
    pairs = tl.join(x, x + 100)  # [N, 2]
    tl.store(out + tl.arange(0, 2 * N), pairs.reshape(2 * N))
    grid = tl.trans(tl.reshape(x, (N // 4, 4)))  # [4, N / 4]
    row, col = tl.arange(0, 4), tl.arange(0, N // 4)
    tl.store(out + 2 * N + row[:, None] * (N // 4) + col[None, :], grid)
    wide = tl.broadcast_to(tl.expand_dims(x, 1), (N, 4)) + tl.zeros((N, 4), x.dtype)
    tl.store(out + 3 * N + at[:, None] * 4 + row[None, :], wide)
    even, odd = tl.split(pairs)
    tl.store(out + 7 * N + at, odd - even)
    tl.store(out + 8 * N + at, tl.permute(tl.reshape(pairs, (2, N // 2, 2)), (2, 0, 1)).reshape(2 * N).sum(0) + at * 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_shapes(dtype: torch.dtype) -> None:
    source, out = torch.arange(16).to(dtype), torch.empty(9 * 16, dtype=dtype)
    shape_kernel[(1,)](source, out, N=16)
    pairs, grid, wide, ones, total = out.split([32, 16, 64, 16, 16])
    assert torch.equal(pairs.view(16, 2), torch.stack([source, source + 100], 1))
    assert torch.equal(grid.view(4, 4), source.view(4, 4).T)
    assert torch.equal(wide.view(16, 4), source[:, None].expand(16, 4))
    assert ones.eq(100).all()
    assert total.eq(torch.tensor(2 * 120 + 1600).to(dtype)).all()


@triton.jit
def scan_kernel(source, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(source + at)
    tl.store(out + at, tl.cumsum(x, 0))
    tl.store(out + N + at, tl.cumsum(x, 0, reverse=True))
    tl.store(out + 2 * N + at, tl.sum((x > 3).to(tl.int32), 0) + tl.max(x, 0) * 10 - tl.min(x, 0) + at * 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_scans_and_sums(dtype: torch.dtype) -> None:
    source = torch.tensor([3, -1, 4, 1, -5, 9, 2, 6]).to(dtype)
    out = torch.empty(24, dtype=dtype)
    scan_kernel[(1,)](source, out, N=8)
    assert torch.equal(out[:8], source.cumsum(0).to(dtype))
    assert torch.equal(out[8:16], source.flip(0).cumsum(0).flip(0).to(dtype))
    assert out[16:].eq(3 + 90 + 5).all()


@triton.jit
def dependent_kernel(out, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out, 1)


@pytest.mark.parametrize("pdl", [False, True])
def test_dependent_launches_do_nothing(pdl: bool) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    dependent_kernel[(1,)](out, PDL=pdl, num_warps=8, num_stages=3, launch_pdl=pdl)
    assert out.item() == 1


@triton.jit
def typed_kernel(out, wide: tl.int64, narrow: tl.int32, plain, far, scale, half: tl.float16, flag, NONE: tl.constexpr):
    tl.static_assert(wide.dtype == tl.int64)
    tl.static_assert(narrow.dtype == tl.int32)
    tl.static_assert(plain.dtype == tl.int32)
    tl.static_assert(far.dtype == tl.int64)
    tl.static_assert(scale.dtype == tl.float32)
    tl.static_assert(half.dtype == tl.float16)
    tl.static_assert(flag.dtype == tl.int1)
    if NONE is None:
        tl.store(out, wide * 3)
        tl.store(out + 1, (narrow + plain).to(tl.int64))
        tl.store(out + 2, far + 1)
        tl.store(out + 3, (scale * 3 == 0.3).to(tl.int64))
        tl.store(out + 4, (half.to(tl.float32) == 0.1).to(tl.int64) + tl.where(flag, 10, 20))
        tl.store(out + 5, (plain * (1 << 30)).to(tl.int64))


def test_arguments_have_the_types_of_a_compiled_kernel() -> None:
    out = torch.empty(6, dtype=torch.int64)
    typed_kernel[(1,)](out, 1 << 30, 5, plain=6, far=1 << 31, scale=0.1, half=0.1, flag=False, NONE=None)
    thrice = int(torch.tensor(0.1) * 3 == torch.tensor(0.3))
    half = int(torch.tensor(0.1).half().float() == torch.tensor(0.1))
    wrapped = (6 << 30) % (1 << 32)
    assert out.tolist() == [3 << 30, 11, (1 << 31) + 1, thrice, half + 20, wrapped - (1 << 32) * (wrapped >> 31)]


def test_a_missing_argument_and_one_too_many_are_errors() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="PDL"):
        dependent_kernel[(1,)](out)
    with pytest.raises(TypeError, match="positional"):
        dependent_kernel[(1,)](out, True, 3)


@triton.jit
def strided_kernel(source, out, stride, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(source + at * stride))


def test_views_are_worked_on_in_place() -> None:
    pool = torch.arange(64.0)
    source, out = pool[8:40:4], pool[56:]
    strided_kernel[(1,)](source, out, 4, N=8)
    assert torch.equal(pool[56:], torch.arange(8.0, 40.0, 4))
    assert torch.equal(pool[:56], torch.arange(56.0))
