"""Tools for people who write kernels: cases that are hard to get right, and a judge whose tolerance is derived.

`Case` describes a call, `build` makes it, `assert_close` judges what a kernel returned for it. `judge_kernel` brings a
kernel before every property within its `Profile`; `mla check` and `pytest --mla-kernel` do that from a shell.
"""

from mla.testing.budget import Budget, budget
from mla.testing.build import Call, build
from mla.testing.case import SM_SCALE, Case
from mla.testing.compare import Mismatch, assert_close, cosine, signal_to_noise
from mla.testing.emulate import Kernel, honest
from mla.testing.profile import Profile
from mla.testing.properties import PROPERTIES, Property
from mla.testing.suite import Failure, Finding, Report, judge_kernel, judge_property

__all__ = [
    "PROPERTIES",
    "SM_SCALE",
    "Budget",
    "Call",
    "Case",
    "Failure",
    "Finding",
    "Kernel",
    "Mismatch",
    "Profile",
    "Property",
    "Report",
    "assert_close",
    "budget",
    "build",
    "cosine",
    "honest",
    "judge_kernel",
    "judge_property",
    "signal_to_noise",
]
