"""From the kernels as they are written to the kernels of one configuration, for a GPU or for the emulator.

A kernel's code object is taken as it is; only what its names mean differs: the numbers of the configuration, the
functions that the configuration chooses, and the instructions (inline PTX, or numpy).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from mla.backends.xqa import isa
from mla.backends.xqa.config import Config
from mla.backends.xqa.kernel import attend, constants, decode, memory, merge, numbers, schedule

KERNELS: dict[str, Callable[..., Any]] = {"decode": decode.decode, "merge": merge.merge}
_MODULES: tuple[ModuleType, ...] = (numbers, schedule, memory, attend, decode, merge)
_NUMBERS = ("NEGATIVE_INFINITY", "LOWEST", "HEADROOM", "NOT_A_NUMBER", "LOG2_E")
_FIXED = {name: getattr(numbers, name) for name in _NUMBERS}
_FIXED |= {name: getattr(constants, name) for name in ("THREADS", "STEPS", "PART_BYTES", "LONGEST")}
_FIXED |= {"AT_ONCE": merge.AT_ONCE, "DIMS_AT_ONCE": merge.DIMS_AT_ONCE}
_FIXED |= {"ALONE": schedule.ALONE, "MEASURED": schedule.MEASURED, "SHORT_STREAM": memory.SHORT_STREAM}
_FIXED |= {"AHEAD_OF_NEED": memory.AHEAD_OF_NEED}
_FIXED |= {"EVICT_NORMAL": isa.EVICT_NORMAL, "EVICT_FIRST": isa.EVICT_FIRST}


def _helpers(kernel: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Every function that is defined in the kernel modules and in a kernel's own, by name."""
    own = sys.modules.get(kernel.__module__)
    return {
        name: value
        for module in (*_MODULES, *([own] if own is not None else []))
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }


def choices(config: Config) -> dict[str, str]:
    """Name in the kernels -> name of the function that this configuration takes for it."""
    query = config.multiplies
    value = "fp16" if config.eight_bit else query
    narrow_query = "word_of_bytes" if config.kind.startswith("e4m3") else "word_of_halves"
    return {
        "mma_scores": f"mma_{query}",
        "mma_values": f"mma_{value}",
        "pack_weights": f"pack_{value}",
        "low_weight": f"low_{value}",
        "low_number": f"low_{value}",
        "high_number": f"high_{value}",
        "widen_keys": "widen_to_bf16" if query == "bf16" else "widen_to_fp16",
        "wait_for_tile": f"cp_async_wait_{config.ahead - 1}",
        "copy16": "cp_async16" if config.aligned else "copy16_by_number",
        "loading_thread": "thread_index_anew" if config.blocks_per_sm > 1 else "thread_index",
        "query_word": "load_u32" if config.aligned else narrow_query,
        "pack_out": "pack_fp16" if config.out == "fp16" else "pack_bf16",
        "store_out": "store_pair" if config.out_pairs else "store_pair_apart",
    }


def specialize(
    config: Config,
    kernel: Callable[..., Any],
    names: dict[str, Any],
    as_helper: Callable[[Callable[..., Any]], Any],
    instead: dict[str, Callable[..., Any]] | None = None,
) -> FunctionType:
    """A kernel whose names mean what they mean in this configuration and on this machine.

    Args:
        config: the configuration.
        kernel: one of `KERNELS`, or any function written in their style.
        names: what instructions and types are here.
        as_helper: what makes a callable of a helper (Numba must be told).
        instead: helpers to take in place of those of the same name: experiments, planted bugs.
    """
    namespace: dict[str, Any] = {"__builtins__": __builtins__, "__name__": __name__}
    namespace |= _FIXED | config.constants | names
    for name, helper in (_helpers(kernel) | (instead or {})).items():
        if name not in names and helper not in KERNELS.values():
            namespace[name] = as_helper(FunctionType(helper.__code__, namespace, name))
    namespace |= {name: namespace[chosen] for name, chosen in choices(config).items()}
    return FunctionType(kernel.__code__, namespace, kernel.__name__)
