"""Bank conflicts: how many times shared memory is accessed for one instruction of a warp.

32 banks of 4 bytes serve one word each at a time. An access of 16 bytes a lane is done for 8 lanes at once, of 8 bytes
for 16, of 4 or less for all 32; lanes at the same word share it.
"""

from __future__ import annotations

import numpy as np

from mla.backends.xqa.emulator.formats import Array


def wavefronts(addresses: Array, size: int) -> int:
    """For one warp: addresses [lanes that take part], `size` bytes each."""
    lanes = {16: 8, 8: 16}.get(size, 32)
    words = (addresses[:, None] // 4) + np.arange(max(size // 4, 1))
    total = 0
    for start in range(0, len(words), lanes):
        distinct = np.unique(words[start : start + lanes])
        total += int(np.bincount(distinct % 32).max())
    return total


def fewest(addresses: Array, size: int) -> int:
    """What the same access would take if no two words shared a bank."""
    lanes = {16: 8, 8: 16}.get(size, 32)
    words = (addresses[:, None] // 4) + np.arange(max(size // 4, 1))
    return sum(-(-len(np.unique(words[start : start + lanes])) // 32) for start in range(0, len(words), lanes))
