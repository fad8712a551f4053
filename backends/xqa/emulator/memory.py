"""Global memory: nothing but the tensors that were handed over, each with its bounds."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.emulator.formats import Array
from mla.memory import span

NOBODY = -1


class Allocation:
    """The bytes that one tensor can reach, and which block wrote each of them last in this grid."""

    def __init__(self, name: str, tensor: torch.Tensor, writable: bool) -> None:
        self.name, self.writable, self.tensor = name, writable, tensor
        self.first, self.end = span(tensor)
        size = self.end - self.first
        self.data: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.first))
        self.writers = np.full(size if writable else 0, NOBODY, np.int32)

    def windows(self, size: int) -> Array:
        """[bytes - size + 1, size]: the `size` bytes from each place on."""
        return as_strided(self.data, (len(self.data) - size + 1, size), (1, 1))


class GlobalMemory:
    """The tensors of one call. Addresses are those of the process: `tensor.data_ptr()` plus steps."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self.block = 0

    def add(self, name: str, tensor: torch.Tensor | None, *, writable: bool = False) -> None:
        """Let a kernel touch a tensor; None and empty ones add nothing."""
        if tensor is None or tensor.numel() == 0:
            return
        allocation = Allocation(name, tensor, writable)
        at = bisect_right(self._starts, allocation.first)
        self._starts.insert(at, allocation.first)
        self._allocations.insert(at, allocation)

    def begin_grid(self) -> None:
        for allocation in self._allocations:
            allocation.writers.fill(NOBODY)

    def _find(self, addresses: Array, size: int) -> tuple[Allocation, Array]:
        """(the tensor, offsets into it) of addresses that all must be within one tensor, aligned to `size`."""
        lowest, highest = int(addresses.min()), int(addresses.max())
        at = bisect_right(self._starts, lowest) - 1
        while at >= 0 and self._allocations[at].end <= lowest:
            at -= 1
        if at < 0:
            raise EmulatorError("bounds", f"global address {lowest:#x} is in no tensor of this call")
        found = self._allocations[at]
        if highest + size > found.end:
            beyond = highest + size - found.end
            raise EmulatorError("bounds", f"{size} bytes of global memory end {beyond} bytes past {found.name}")
        if (addresses % size).any():
            raise EmulatorError("alignment", f"global address in {found.name} is no multiple of {size}")
        return found, addresses - found.first

    def load(self, addresses: Array, size: int, active: Array) -> Array:
        """[lanes, size] bytes; zeros for lanes that are not active."""
        data = np.zeros((len(addresses), size), np.uint8)
        if active.all():
            found, offsets = self._find(addresses, size)
            return found.windows(size)[offsets]
        if active.any():
            found, offsets = self._find(addresses[active], size)
            data[active] = found.windows(size)[offsets]
        return data

    def store(self, addresses: Array, data: Array, active: Array) -> None:
        """Write [lanes, size] bytes in lanes that are active."""
        if not active.any():
            return
        size = data.shape[1]
        found, offsets = self._find(addresses[active], size)
        if not found.writable:
            raise EmulatorError("read-only", f"a write to {found.name}, which is an input")
        places = offsets[:, None] + np.arange(size)
        writers = found.writers[places]
        other = (writers != NOBODY) & (writers != self.block)
        if other.any():
            raise EmulatorError(
                "two blocks",
                f"blocks {int(writers[other][0])} and {self.block} of one grid write the same place of {found.name}",
            )
        if len(np.unique(offsets)) != len(offsets):
            raise EmulatorError("two blocks", f"two threads write the same place of {found.name} at once")
        found.writers[places] = self.block
        found.data[places] = data[active]

    def names(self) -> dict[str, Any]:
        """Name -> (first address, bytes)."""
        return {one.name: (one.first, one.end - one.first) for one in self._allocations}
