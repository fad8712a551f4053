"""bf16, fp16 and e4m3 as bits in numpy: exact into fp32, rounded to nearest even out of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _e4m3_values() -> Array:
    """The 256 numbers of float8_e4m3fn: 4 bits of exponent with bias 7, 3 of mantissa, NaN where all seven are ones."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((code & 127) == 127, np.nan, size)
    return np.where(code & 128, -size, size).astype(np.float32)


NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]
"""The NaN that conversions into fp32 and arithmetic in fp32 give."""
E4M3 = _e4m3_values()
E4M3_AS_FP16 = np.where(np.isnan(E4M3), np.uint16(0x7FFF), E4M3.astype(np.float16).view(np.uint16))


def halves(words: Array) -> Array:
    """[...] uint32 -> [..., 2] uint16, the low half first."""
    return np.ascontiguousarray(words, np.uint32).view(np.uint16).reshape(*words.shape, 2)


def join(low: Array, high: Array) -> Array:
    """Two arrays of 16 bits -> uint32."""
    joined: Array = low.astype(np.uint32) | (high.astype(np.uint32) << 16)
    return joined


def bf16_to_fp32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp16_to_fp32(bits: Array) -> Array:
    """NaN becomes 0x7fffffff, whatever its bits were, as the instruction has it."""
    x = bits.astype(np.uint16, copy=False).view(np.float16).astype(np.float32)
    return np.where(np.isnan(x), NAN, x)


def e4m3_to_fp32(bits: Array) -> Array:
    return E4M3[bits]


def fp32_to_bf16(x: Array) -> Array:
    """uint16 bits; NaN becomes 0x7fff, as the instruction has it."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # infinity stays: its lower half is 0
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def fp32_to_fp16(x: Array) -> Array:
    """uint16 bits; NaN becomes 0x7fff, as the instruction has it."""
    bits = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)
