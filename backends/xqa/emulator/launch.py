"""A grid of blocks, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.emulator.lanes import Lanes
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.emulator.names import names_for
from mla.backends.xqa.emulator.trace import Trace
from mla.backends.xqa.specialize import specialize

DIVERGENCE = (
    "truth value of an array",
    "only integer scalar arrays",
    "only length-1 arrays",
    "only 0-dimensional arrays",
)


@dataclass(frozen=True)
class Grid:
    """A launch.

    Attributes:
        kernel: a function that is written like a kernel. config: what its constants are.
        arguments: parameter -> value; addresses are those of tensors in a `GlobalMemory`.
        blocks, threads, shared_bytes: its sizes.
        instead: helpers to take in place of those of the same name.
    """

    kernel: Callable[..., Any]
    config: Config
    arguments: dict[str, Any]
    blocks: int
    threads: int
    shared_bytes: int
    instead: dict[str, Callable[..., Any]] | None = None


def run_grid(grid: Grid, memory: GlobalMemory, *, watch: bool = True) -> None:
    """Run a kernel for every block.

    Args:
        grid: the launch. memory: the tensors that it may touch.
        watch: look for races.

    Raises:
        EmulatorError: the kernel does something that it must not.
    """
    memory.begin_grid()
    for block in range(grid.blocks):
        run_block(grid, memory, block, watch=watch)


def run_block(
    grid: Grid, memory: GlobalMemory, block: int, *, watch: bool = True, banks: bool = False, trace: Trace | None = None
) -> Lanes:
    """Run a kernel for one block, and return the block as it is at the end.

    Args:
        grid, memory, watch: as in `run_grid`. block: which one.
        banks: count bank conflicts, in `.shared.banks`.
        trace: what it did is added here.
    """
    memory.block = block
    lanes = Lanes(memory, grid.shared_bytes, grid.threads, block, watch=watch, banks=banks, trace=trace)
    function = specialize(grid.config, grid.kernel, names_for(lanes), lambda helper: helper, grid.instead)
    with np.errstate(all="ignore"):
        try:
            function(**grid.arguments)
        except (ValueError, TypeError) as error:
            if any(text in str(error) for text in DIVERGENCE):
                raise EmulatorError("divergence", "a branch or a loop differs from thread to thread") from error
            raise
    return lanes
