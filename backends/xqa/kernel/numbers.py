# mypy: ignore-errors
"""Small helpers on number formats, and stand-ins for the names that a configuration binds."""

import numpy as np

from mla.backends.xqa import isa
from mla.backends.xqa.isa import (
    float_of_bits,
    high_e4m3_to_fp16,
    high_fp16,
    low_e4m3_to_fp16,
    low_fp16,
    pack_bf16,
)

NEGATIVE_INFINITY = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min  # stands for a key's score of minus infinity: minus infinity itself is no key
HEADROOM = np.float32(8.0)  # weights are at most 2 to this: far from the largest number of fp16 or bf16
NOT_A_NUMBER = np.float32(np.nan)
LOG2_E = np.float32(1.4426950408889634)


def low_bf16(x):
    """The bf16 number in bits 0-15 of a register, in fp32."""
    return float_of_bits(x << 16)


def high_bf16(x):
    """The bf16 number in bits 16-31."""
    return float_of_bits(x & 0xFFFF0000)


# Bound in `numba_names.py` and `emulator/lanes.py`, each in its own way.


def select(condition, yes, no):
    """`yes` in threads where the condition holds, `no` in others; both are computed."""
    raise NotImplementedError


def smaller_int(x, y):
    raise NotImplementedError


def larger_int(x, y):
    raise NotImplementedError


int32 = np.int32
int64 = np.int64
uint32 = np.uint32
float32 = np.float32


class cuda:  # noqa: N801 - by this name Numba knows it
    """`cuda.local.array(n, dtype)`: n registers of a thread, indexed by numbers known at compile time."""

    class local:  # noqa: N801
        @staticmethod
        def array(shape, dtype):
            raise NotImplementedError


# Bound by `specialize.py` from the configuration. Here: those of kind "bf16".

mma_scores = isa.mma_bf16  # QK^T
mma_values = isa.mma_bf16  # PV
pack_weights = isa.pack_bf16  # two softmax weights into a register
low_weight = low_bf16  # and out of it
high_weight = high_bf16
low_number = low_bf16  # two 16-bit numbers of the cache out of a register
high_number = high_bf16
wait_for_tile = isa.cp_async_wait_0  # until all but AHEAD - 1 groups have landed


def widen_keys(x):
    """Four e4m3 of a key as two registers of the query's format: dims 0, 1 and dims 2, 3."""
    raise NotImplementedError


def widen_to_fp16(x):
    return low_e4m3_to_fp16(x), high_e4m3_to_fp16(x)


def widen_to_bf16(x):
    low = low_e4m3_to_fp16(x)
    high = high_e4m3_to_fp16(x)
    return (
        pack_bf16(low_fp16(low), high_fp16(low)),
        pack_bf16(low_fp16(high), high_fp16(high)),
    )
