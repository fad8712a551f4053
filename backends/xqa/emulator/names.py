"""What a kernel's names mean in the emulator: the counterpart of `numba_names.py`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from mla.backends.xqa.emulator.lanes import Lanes, Registers
from mla.backends.xqa.instruction import INSTRUCTIONS


def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` in threads where the condition holds. A shared condition keeps a shared choice shared."""
    if not isinstance(condition, np.ndarray):
        return yes if condition else no
    return np.where(condition, yes, no)


def smaller_int(x: Any, y: Any) -> Any:
    return np.minimum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else min(x, y)


def larger_int(x: Any, y: Any) -> Any:
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


def _wrap(bits: int) -> Callable[[Any], Any]:
    """A cast to a signed integer of so many bits, as int64."""
    dtype = {32: np.int32, 64: np.int64}[bits]

    def cast(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.astype(dtype).astype(np.int64)
        return ((int(x) + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))

    return cast


def _registers(count: int, dtype: Any) -> Registers:
    return Registers(count, dtype)


def names_for(block: Lanes) -> dict[str, Any]:
    """Name in a kernel -> what it is for this block."""
    names: dict[str, Any] = {name: getattr(block, name) for name in INSTRUCTIONS}
    if block.trace is not None:
        names = {name: block.trace.watching(name, run) for name, run in names.items()}
    return names | {
        "cuda": SimpleNamespace(local=SimpleNamespace(array=_registers)),
        "shared_base": block.shared_base,
        "select": select,
        "smaller_int": smaller_int,
        "larger_int": larger_int,
        "int32": _wrap(32),
        "int64": _wrap(64),
        "uint32": np.uint32,
        "float32": np.float32,
    }
