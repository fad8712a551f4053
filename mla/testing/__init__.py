"""Tools for people who write kernels: cases that are hard to get right, and a judge whose tolerance is derived.

`Case` describes a call, `build` makes it, `assert_close` judges what a kernel returned for it.
"""

from mla.testing.budget import Budget, budget
from mla.testing.build import Call, build
from mla.testing.case import SM_SCALE, Case
from mla.testing.compare import Mismatch, assert_close, cosine, signal_to_noise

__all__ = [
    "SM_SCALE",
    "Budget",
    "Call",
    "Case",
    "Mismatch",
    "assert_close",
    "budget",
    "build",
    "cosine",
    "signal_to_noise",
]
