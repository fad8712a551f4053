"""Products, powers and logarithms in the interpreter: exact where they can be, and else within what is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def ids(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def assert_equal(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=0, equal_nan=True)


@triton.jit
def dot_kernel(left, right, target, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(left + m[:, None] * K + k[None, :])
    b = tl.load(right + n[:, None] * K + k[None, :])  # [N, K]
    acc = tl.full((M, N), 1, target.dtype.element_ty)
    acc = tl.dot(a, tl.trans(b), acc, out_dtype=target.dtype.element_ty)
    tl.store(target + m[:, None] * N + n[None, :], acc)


def dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(left), len(right), dtype=torch.int32 if left.dtype is torch.int8 else torch.float32)
    dot_kernel[(1,)](left, right, out, M=len(left), N=len(right), K=left.shape[1])
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3, torch.float32, torch.int8], ids=ids)
def test_a_dot_of_exact_products_and_sums_is_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    left = torch.randint(-8, 9, (16, 128), generator=generator).to(dtype)
    right = torch.randint(-8, 9, (32, 128), generator=generator).to(dtype)
    assert torch.equal(dot(left, right), left.float() @ right.float().T + 1)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3], ids=ids)
def test_a_dot_accumulates_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.randn(rows, 512, generator=generator).to(dtype) for rows in (16, 64))
    exact = left.double() @ right.double().T + 1
    budget = 512 * 2**-24 * (left.double().abs() @ right.double().abs().T + 1)  # products are exact, sums are not
    assert ((dot(left, right) - exact).abs() <= budget).all()


def test_a_nan_goes_through_a_dot() -> None:
    left, right = torch.ones(16, 32, dtype=E4M3), torch.ones(16, 32, dtype=E4M3)
    left.view(torch.uint8)[3, 5] = 0x7F
    out = dot(left, right)
    assert out[3].isnan().all()
    assert torch.equal(out[:3], torch.full((3, 16), 33.0))


@triton.jit
def unary_kernel(source, target, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(source + at)
    tl.store(target + at, tl.exp2(value) if OP == "exp2" else tl.log2(value))


@pytest.mark.parametrize("op", ["exp2", "log2"])
def test_exp2_and_log2_are_within_the_four_ulps_that_numpy_promises(op: str) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.rand(1 << 16, generator=generator) * 252 - 126
    values = values if op == "exp2" else values.exp2()
    out = torch.empty_like(values)
    unary_kernel[(1,)](values, out, OP=op, BLOCK=1 << 16)
    exact = getattr(torch, op)(values.double())
    ulp = exact.abs().log2().floor().sub(23).exp2()
    assert ((out - exact).abs() <= 4 * ulp).all()


def test_exp2_and_log2_know_their_limits() -> None:
    values, out = torch.tensor([-torch.inf, torch.inf, 0.0, 128.0, -160.0, torch.nan, 1.0, 2.0]), torch.empty(8)
    unary_kernel[(1,)](values, out, OP="exp2", BLOCK=8)
    assert_equal(out, [0, torch.inf, 1, torch.inf, 0, torch.nan, 2, 4])
    unary_kernel[(1,)](values, out, OP="log2", BLOCK=8)
    assert_equal(out, [torch.nan, torch.inf, -torch.inf, 7, torch.nan, torch.nan, 0, 1])
