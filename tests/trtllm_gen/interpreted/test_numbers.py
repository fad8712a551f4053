"""The interpreter's numbers are PyTorch's, bit for bit: every bf16 and e4m3 value, and fp32 in all its corners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mla.backends.trtllm_gen.gpu_numbers import bf16_to_fp32, e4m3_to_fp32, fp32_to_bf16, fp32_to_e4m3

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = [BF16, torch.float16, E4M3, torch.float32]
BLOCK = 1024


def ids(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a narrow dtype; of fp32, every bf16 and its neighbours, ties and their neighbours, random bits."""
    if dtype is E4M3:
        return torch.arange(256).to(torch.uint8).view(dtype).repeat(4)
    if dtype is not torch.float32:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    bits = torch.arange(-(1 << 15), 1 << 15)[:, None] << 16
    tie = 1 << 15
    near = torch.tensor([-1, 0, 1, tie - 1, tie, tie + 1])  # halfway to the next bf16
    e4m3_ties = torch.arange(128).to(torch.uint8).view(E4M3).float()
    e4m3_ties = (e4m3_ties[1:-1] + e4m3_ties[:-2]) / 2
    e4m3_ties = torch.cat([e4m3_ties, e4m3_ties.nextafter(torch.tensor(0.0)), e4m3_ties.nextafter(torch.tensor(1e9))])
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([(bits + near).flatten(), random]).to(torch.int32).view(torch.float32)
    return torch.cat([values, e4m3_ties, -e4m3_ties, torch.tensor([448.0, 464.0, 464.1, 1e30, torch.inf, -torch.inf])])


def shuffled(values: torch.Tensor) -> torch.Tensor:
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bits, with one pattern for every NaN: which one an operation makes is nobody's promise."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values).contiguous().view(integer)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(bits_of(got), bits_of(expected), rtol=0, atol=0)


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """PyTorch's cast, with a GPU's saturation: PyTorch makes NaN of what is beyond 448."""
    if dtype is E4M3:
        values = values.float()
        values = torch.where(values.isnan(), values, values.clamp(-448, 448))
    return values.to(dtype)


@triton.jit
def cast_kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < n, other=0.0)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=at < n)


@pytest.mark.parametrize("target", DTYPES, ids=ids)
@pytest.mark.parametrize("source", DTYPES, ids=ids)
def test_a_cast_rounds_to_nearest_even_and_saturates_in_e4m3(source: torch.dtype, target: torch.dtype) -> None:
    values = every(source)
    out = torch.empty(values.shape, dtype=target)
    cast_kernel[(triton.cdiv(len(values), 1 << 17),)](values, out, len(values), BLOCK=1 << 17)
    assert_same(out, cast(values, target))


def test_what_a_store_casts_is_cast_the_same_way() -> None:
    values, out = every(torch.float32), torch.empty(1, dtype=BF16)

    @triton.jit
    def store_kernel(source, target, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at))

    values = values[: 1 << 17]
    out = torch.empty(values.shape, dtype=BF16)
    store_kernel[(1,)](values, out, BLOCK=1 << 17)
    assert_same(out, values.to(BF16))


@triton.jit
def truncate_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_a_cast_that_asks_for_truncation_truncates() -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(7))
    out = torch.empty(1024, dtype=BF16)
    truncate_kernel[(1,)](values, out, BLOCK=1024)
    assert torch.equal(out.float().view(torch.int32), values.view(torch.int32) & -(1 << 16))


@triton.jit
def integer_kernel(source, target, back, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < n, other=0).to(target.dtype.element_ty)
    tl.store(target + at, value, mask=at < n)
    tl.store(back + at, value.to(tl.int32), mask=at < n)


def test_integers_are_cast_to_bf16_and_back() -> None:
    values = torch.arange(-50000, 50000, 7, dtype=torch.int32)
    out, back = torch.empty(values.shape, dtype=BF16), torch.empty_like(values)
    integer_kernel[(triton.cdiv(len(values), BLOCK),)](values, out, back, len(values), BLOCK=BLOCK)
    assert_same(out, values.to(BF16))
    assert torch.equal(back, values.to(BF16).to(torch.int32))


@triton.jit
def binary_kernel(left, right, target, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(left + at), tl.load(right + at)
    if OP == "add":
        result = a + b
    elif OP == "sub":
        result = a - b
    elif OP == "mul":
        result = a * b
    elif OP == "negative":
        result = -a
    elif OP == "max":
        result = tl.maximum(a, b)
    elif OP == "min":
        result = tl.minimum(a, b)
    elif OP == "where":
        result = tl.where(a < b, a, b)
    elif OP == "less":
        result = (a < b).to(tl.float32)
    elif OP == "equal":
        result = ((a == b) & (a <= b)).to(tl.float32)
    elif OP == "abs":
        result = tl.abs(a)
    elif OP == "exp2":
        result = tl.exp2(a.to(tl.float32))
    tl.store(target + at, result.to(target.dtype.element_ty))


def but_nan(choose: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A GPU's maximum: of a number and a NaN it is the number. PyTorch's fmax gives a signalling NaN back."""
    return torch.where(a.isnan(), b, torch.where(b.isnan(), a, choose(a, b)))


BINARY: dict[str, Any] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "negative": lambda a, b: -a,
    "max": lambda a, b: but_nan(torch.maximum, a, b),
    "min": lambda a, b: but_nan(torch.minimum, a, b),
    "where": lambda a, b: torch.where(a < b, a, b),
    "less": lambda a, b: (a < b).to(a.dtype),
    "equal": lambda a, b: (a == b).to(a.dtype),
    "abs": lambda a, b: a.abs(),
}


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=ids)
def test_arithmetic_is_rounded_once(op: str, dtype: torch.dtype) -> None:
    left = every(dtype)[: 1 << 16]
    right = shuffled(left)
    out = torch.empty_like(left)
    binary_kernel[(1,)](left, right, out, OP=op, BLOCK=1 << 16)
    expected = BINARY[op](left, right)
    if op in ("max", "min", "negative"):  # of 0 and -0 either is right, and before Triton 3.8, -a is compiled as 0 - a
        out, expected = out + 0, expected + 0
    assert_same(out, expected)


@pytest.mark.parametrize("other", [BF16, torch.float16, E4M3], ids=ids)
def test_a_narrow_number_and_an_fp32_number_meet_in_fp32(other: torch.dtype) -> None:
    left = every(other)[:1024].contiguous()
    right = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    out = torch.empty(1024)

    @triton.jit
    def mixed_kernel(left, right, target, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(left + at).to(tl.float32) * tl.load(right + at))

    mixed_kernel[(1,)](left, right, out, BLOCK=1024)
    assert_same(out, left.float() * right)


@triton.jit
def bitcast_kernel(source, target, VIA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at)
    tl.store(target + at, tl.cast(value.to(VIA, bitcast=True), target.dtype.element_ty, bitcast=True))


PAIRS = [
    (BF16, torch.int16, tl.int16),
    (torch.float16, torch.int16, tl.int16),
    (BF16, torch.float16, tl.int16),
    (torch.int16, BF16, tl.float16),
    (E4M3, torch.uint8, tl.int8),
    (torch.uint8, E4M3, tl.uint8),
    (torch.float32, torch.int32, tl.int32),
]


@pytest.mark.parametrize(("source", "target", "via"), PAIRS, ids=ids)
def test_a_bitcast_keeps_the_bits(source: torch.dtype, target: torch.dtype, via: tl.dtype) -> None:
    size = 1024 if source.itemsize == 1 else 1 << 16
    values = torch.arange(size * source.itemsize, dtype=torch.int64).mul(40503).to(torch.uint8).view(source)
    if source.itemsize == 2:
        values = every(BF16).view(source)
    out = torch.empty(size, dtype=target)
    bitcast_kernel[(1,)](values, out, VIA=via, BLOCK=size)
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))


@triton.jit
def reduce_kernel(source, target, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    value = tl.load(source + m[:, None] * N + n[None, :])
    if OP == "max":
        result = tl.max(value, 1)
    elif OP == "min":
        result = tl.min(value, 1)
    else:
        result = tl.sum(value, 1)
    tl.store(target + m, result.to(target.dtype.element_ty))


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=ids)
def test_extremes_skip_nan(op: str, dtype: torch.dtype) -> None:
    values = shuffled(every(dtype)[: 1 << 16]).view(1 << 12, 16).clone()
    values[0] = torch.nan
    values[1] = -torch.inf
    out = torch.empty(1 << 12, dtype=dtype)
    reduce_kernel[(1,)](values, out, OP=op, M=1 << 12, N=16)
    empty = -torch.inf if op == "max" else torch.inf
    expected = getattr(torch, f"a{op}")(torch.where(values.isnan(), empty, values), dim=1)
    expected[values.isnan().all(dim=1)] = torch.nan
    assert_same(out + 0, expected + 0)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.int32], ids=ids)
def test_a_sum_of_exact_sums_is_exact(dtype: torch.dtype) -> None:
    values = torch.randint(-4, 5, (64, 32), generator=torch.Generator().manual_seed(6)).to(dtype)
    out = torch.empty(64, dtype=dtype)
    reduce_kernel[(1,)](values, out, OP="sum", M=64, N=32)
    assert torch.equal(out, values.sum(dim=1, dtype=dtype))


@pytest.mark.parametrize("up", [bf16_to_fp32, e4m3_to_fp32, fp32_to_bf16, fp32_to_e4m3])
def test_a_conversion_keeps_the_shape_even_of_one_number(up: Any) -> None:
    one = torch.tensor(1.0 if up in (fp32_to_bf16, fp32_to_e4m3) else 1)
    values = one.numpy() if one.is_floating_point() else one.to(torch.uint8).numpy()
    assert up(values).shape == ()
    assert up(values[None, None]).shape == (1, 1)
