"""From a kernel to PTX, with Numba. The only module besides `numba_names.py` that imports it; needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mla.backends.xqa.config import MERGE_THREADS, THREADS, Config
from mla.backends.xqa.plan import argument_names, argument_type
from mla.backends.xqa.specialize import KERNELS, specialize

ENTRY = {"decode": "mla_xqa_decode", "merge": "mla_xqa_merge"}
"""The names of the kernels in PTX and machine code."""


def relevant(config: Config, kernel: str) -> Config:
    """The configuration without what makes no difference to a kernel: fewer to compile."""
    return config if kernel == "decode" else replace(config, aligned=True, stages=2, blocks_per_sm=1)


def compile_ptx(config: Config, kernel: str, capability: tuple[int, int]) -> str:
    """The PTX of a kernel for a compute capability, its entry named as in `ENTRY`. Takes some seconds.

    Raises:
        Whatever Numba raises when it cannot compile; RuntimeError when its output has another form than expected.
    """
    config = relevant(config, kernel)
    kinds = [argument_type(name) for name in argument_names(kernel)]
    bounds = (THREADS, config.blocks_per_sm) if kernel == "decode" else (MERGE_THREADS, 2)
    return ptx_of(KERNELS[kernel], ENTRY[kernel], kinds, config, capability, bounds)


def ptx_of(
    kernel: Callable[..., Any],
    entry_name: str,
    argument_types: list[str],
    config: Config,
    capability: tuple[int, int],
    bounds: tuple[int, int],
) -> str:
    """The PTX of any function that is written like a kernel.

    Args:
        kernel: the function. argument_types: of its parameters, in the words of `isa.py`.
        entry_name: its name in PTX.
        config: what the names of constants mean.
        capability: the chip. bounds: threads of a block, and blocks of a multiprocessor.
    """
    import numba.cuda
    from numba import types

    from mla.backends.xqa.numba_names import NAMES, device_function

    helper: Callable[[Callable[..., Any]], Any] = device_function(capability)
    names = NAMES | {"shared_base": helper(NAMES["shared_base"])}
    function = specialize(config, kernel, names, helper)
    numba_types = {"I64": types.int64, "I32": types.int32, "F32": types.float32}
    signature = tuple(numba_types[kind] for kind in argument_types)
    numba_cuda: Any = numba.cuda
    ptx, _ = numba_cuda.compile(
        function, signature, device=False, abi="numba", cc=capability, opt=True, debug=False, launch_bounds=bounds
    )
    entry = re.search(r"\.visible \.entry (\w+)\(", ptx)
    if entry is None:
        raise RuntimeError(f"Numba's PTX for {entry_name} has no entry")
    return str(ptx.replace(entry[1], entry_name))
