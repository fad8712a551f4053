"""Numbers as a GPU has them, in numpy, which lacks bf16 and e4m3: held as uint16 and uint8, in arrays of any shape."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def bf16_to_fp32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: Array) -> Array:
    """Round to nearest, ties to even. NaN becomes the one NaN that a GPU makes."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def e4m3_to_fp32(bits: Array) -> Array:
    return np.asarray(_e4m3_values()[bits])


def fp32_to_e4m3(values: Array) -> Array:
    """Round to nearest, ties to even; beyond 448 (infinities too) is 448, and NaN is the one NaN that a GPU makes."""
    values = np.asarray(values, np.float32)
    size = np.abs(values)
    bits = size.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).astype(np.int32) - (120 << 3)  # exponent bias 127 -> 7
    steps = np.rint(np.minimum(size, 1) * 512)  # below 2^-6 the codes are multiples of 2^-9, and 8 is 2^-6 itself
    codes = np.where(size < 2**-6, steps.astype(np.int32), np.minimum(normal, 0x7E))
    return np.where(np.isnan(values), 0x7F, codes | (np.signbit(values).astype(np.int32) << 7)).astype(np.uint8)


def but_nan(choose: Any, left: Array, right: Array) -> Array:
    """The larger or the smaller; a NaN only where both are."""
    return np.where(np.isnan(left), right, np.where(np.isnan(right), left, choose(left, right)))


def extreme_but_nan(choose: Any, data: Array, axis: int | None, keepdims: bool) -> Any:
    """The largest or the smallest along an axis; a NaN only where all are."""
    if data.dtype.kind != "f":
        return choose(data, axis=axis, keepdims=keepdims)
    missing = np.isnan(data)
    found = choose(np.where(missing, -np.inf if choose is np.max else np.inf, data), axis=axis, keepdims=keepdims)
    return np.where(missing.all(axis=axis, keepdims=keepdims), np.nan, found)


@functools.cache
def _e4m3_values() -> Array:
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    sizes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    sizes[0x7F] = np.nan
    return np.concatenate([sizes, -sizes]).astype(np.float32)
