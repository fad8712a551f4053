"""Planted faults: wrong kernels, each with one mistake, to see whether a suite would notice.

Every fault is the honest kernel of `mla.testing.emulate` with one step overridden. `FAULTS` has them by name, with a
sentence that says what is wrong and small cases that show it.
"""

from mla.testing.faults import (
    addressing,
    lse,
    masking,
    operands,
    outputs,
    rows,
    scaling,
    sinks,
    softmax,
    sparse,
    splits,
    traces,
)
from mla.testing.faults.fault import FAULTS, NEEDS, Fault, judged_wrong

FAMILIES = (masking, addressing, operands, scaling, softmax, splits, sinks, sparse, rows, outputs, lse, traces)
"""The modules that hold the faults, one for each family."""

__all__ = ["FAMILIES", "FAULTS", "NEEDS", "Fault", "judged_wrong"]
