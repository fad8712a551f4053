"""The fragments of `mma.sync` as matrices: which lane holds what (drawn in `isa.py`), for computing and for looking.

A register of a warp is an array [..., 32]; g = lane // 4 and t = lane % 4, so its lanes are [8 (g), 4 (t)].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mla.backends.xqa.emulator import formats
from mla.backends.xqa.emulator.formats import Array

Widen = Callable[[Array], Array]
"""uint32 [..., 32] -> fp32 [..., 8 (g), numbers in 16 bytes], the lanes t side by side."""


def _side_by_side(numbers: Array) -> Array:
    """[..., 32, n] -> [..., 8, 4 n]."""
    return numbers.reshape(*numbers.shape[:-2], 8, 4 * numbers.shape[-1])


def widen_bf16(words: Array) -> Array:
    return _side_by_side(formats.bf16_to_fp32(formats.halves(words)))


def widen_fp16(words: Array) -> Array:
    return _side_by_side(formats.fp16_to_fp32(formats.halves(words)))


def widen_e4m3(words: Array) -> Array:
    codes = np.ascontiguousarray(words, np.uint32).view(np.uint8).reshape(*words.shape, 4)
    return _side_by_side(formats.e4m3_to_fp32(codes))


WIDEN: dict[str, Widen] = {"bf16": widen_bf16, "fp16": widen_fp16, "e4m3": widen_e4m3}


def matrix_a(registers: Sequence[Array], widen: Widen) -> Array:
    """a0..a3, each uint32 [..., 32] -> fp32 [..., 16 rows, k]."""
    a0, a1, a2, a3 = (widen(register) for register in registers)
    return np.concatenate([np.concatenate([a0, a2], -1), np.concatenate([a1, a3], -1)], -2)


def matrix_b(registers: Sequence[Array], widen: Widen) -> Array:
    """b0, b1, each uint32 [..., 32] -> fp32 [..., k, 8 columns]."""
    b0, b1 = (widen(register) for register in registers)
    return np.concatenate([b0, b1], -1).swapaxes(-1, -2)


def matrix_c(registers: Sequence[Array]) -> Array:
    """c0..c3, each fp32 [..., 32] -> [..., 16 rows, 8 columns]."""
    c0, c1, c2, c3 = registers
    upper = _side_by_side(np.stack([c0, c1], -1))
    lower = _side_by_side(np.stack([c2, c3], -1))
    return np.concatenate([upper, lower], -2)


def registers_of_c(matrix: Array) -> tuple[Array, ...]:
    """[..., 16 rows, 8 columns] -> c0..c3, each [..., 32]."""
    lead = matrix.shape[:-2]
    pairs = matrix.reshape(*lead, 2, 8, 4, 2)  # upper or lower half, g, t, even or odd column
    halves = [pairs[..., half, :, :, odd] for half in (0, 1) for odd in (0, 1)]
    return tuple(np.ascontiguousarray(half).reshape(*lead, 32) for half in halves)
