"""Kernels to compile: a matrix product, two that follow each other, a wrong one, and one without any."""

import triton
import triton.language as tl


@triton.jit
def product_kernel(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr):
    row, col, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, k, K, num_stages=STAGES):
        left = tl.load(a + row[:, None] * k + start + inner[None, :])
        right = tl.load(b + col[None, :] * k + start + inner[:, None])
        acc = tl.dot(left, right, acc)
    tl.store(c + row[:, None] * N + col[None, :], acc)


@triton.jit
def two_products_kernel(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr):
    row, col, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + row[:, None] * N + col[None, :])
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, k, K, num_stages=STAGES):
        right = tl.load(b + (start + inner)[:, None] * N + col[None, :])
        acc = tl.dot(tl.dot(left, tl.trans(right)).to(right.dtype), right, acc)
    tl.store(c + row[:, None] * N + col[None, :], acc)


@triton.jit
def wrong_kernel(a, N: tl.constexpr):
    tl.store(a, tl.arange(0, N))  # N is no power of two


@triton.jit
def converted_kernel(a, out, n: tl.int64, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at, mask=at < n, other=0.0).to(tl.float32), mask=at < n)
