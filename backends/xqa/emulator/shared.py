"""Shared memory: bytes, copies under way, and who touched what since the last barrier.

Accesses are watched in words of 4 bytes. A stamp is epoch * 64 + warp; an epoch ends at each barrier.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from mla.backends.xqa.emulator.banks import fewest, wavefronts
from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.emulator.formats import Array

BASE = 1024  # where a block's own shared memory begins; the system has what lies before
EPOCH = 64
MANY = 63  # "warp" of a word that several warps have read


@dataclass
class Conflicts:
    """Accesses from one line of a kernel: wavefronts that they took, and would take without bank conflicts."""

    taken: int = 0
    fewest: int = 0


class SharedMemory:
    """The shared memory of one block."""

    def __init__(self, size: int, threads: int, *, watch: bool = True, banks: bool = False) -> None:
        self.words = np.full(-(-size // 4), 0xFFFFFFFF, np.uint32)  # NaN, in every format
        self.size, self.watch = size, watch
        self.warp = (np.arange(threads) >> 5).astype(np.int64)
        self.epoch = 1
        self.written = np.zeros(len(self.words), np.int64)
        self.read = np.zeros(len(self.words), np.int64)
        self.landing = np.zeros(len(self.words), bool)  # a copy into it has not been waited for
        self.banks: dict[tuple[str, int], Conflicts] | None = {} if banks else None
        self._pending: list[tuple[Array, Array, Array]] = []
        self._groups: list[list[tuple[Array, Array, Array]]] = []

    def barrier(self) -> None:
        self.epoch += 1

    def _places(self, addresses: Array, size: int, warp: Array) -> Array:
        """[lanes, words] indices of the words from each address on."""
        at = addresses - BASE
        if (at & (size - 1)).any():
            wrong = int(addresses[(at & (size - 1)) != 0][0])
            raise EmulatorError("alignment", f"shared address {wrong} is no multiple of {size}")
        if int(at.min()) < 0 or int(at.max()) + size > self.size:
            raise EmulatorError(
                "bounds", f"shared memory of {self.size} bytes is accessed at {int(at.min())} to {int(at.max()) + size}"
            )
        if self.banks is not None:
            self._count(addresses, size, warp)
        first: Array = at >> 2
        return first[:, None] if size <= 4 else first[:, None] + np.arange(size // 4)

    def _count(self, addresses: Array, size: int, warp: Array) -> None:
        """Add the wavefronts of an access to those of the kernel's line that it comes from."""
        assert self.banks is not None
        frame = sys._getframe(1)
        while "/emulator/" in frame.f_code.co_filename.replace("\\", "/") and frame.f_back is not None:
            frame = frame.f_back
        conflicts = self.banks.setdefault((frame.f_code.co_name, frame.f_lineno), Conflicts())
        for one in np.unique(warp):
            mine = addresses[warp == one]
            conflicts.taken += wavefronts(mine, size)
            conflicts.fewest += fewest(mine, size)

    def _watch_read(self, places: Array, warp: Array) -> None:
        now = self.epoch * EPOCH
        mine = now + warp[:, None]
        writer = self.written[places]
        self._refuse(places, (writer >= now) & (writer != mine), writer, warp, "reads")
        seen = self.read[places]
        stamp = np.where((seen >= now) & (seen != mine), now + MANY, mine)
        self.read[places] = stamp
        lost = self.read[places] != stamp  # two warps in this very access
        if lost.any():
            self.read[places[lost]] = now + MANY

    def _watch_write(self, places: Array, warp: Array) -> None:
        now = self.epoch * EPOCH
        mine = now + warp[:, None]
        writer, reader = self.written[places], self.read[places]
        self._refuse(places, (writer >= now) & (writer != mine), writer, warp, "writes")
        self._refuse(places, (reader >= now) & (reader != mine), reader, warp, "writes")
        self.written[places] = mine
        if (self.written[places] != mine).any():
            raise EmulatorError("race", "two warps write the same place of shared memory at once")

    def _refuse(self, places: Array, wrong: Array, other: Array, warp: Array, does: str) -> None:
        if not wrong.any():
            return
        lane, word = (int(i) for i in np.argwhere(wrong)[0])
        whom = int(other[lane, word]) % EPOCH
        others = "several warps" if whom == MANY else f"warp {whom}"
        raise EmulatorError(
            "race",
            f"warp {int(warp[lane])} {does} byte {int(places[lane, word]) * 4} of shared memory, which {others} "
            "touched with no barrier in between",
        )

    def load(self, addresses: Array, size: int, lanes: Array | None = None) -> Array:
        """[lanes, max(size // 4, 1)] words; for 1 or 2 bytes the word that holds them. lanes: which threads, or all."""
        warp = self.warp if lanes is None else self.warp[lanes]
        places = self._places(addresses, size, warp)
        if self.landing[places].any():
            raise EmulatorError("unfinished copy", "shared memory is read before the copy into it was waited for")
        if self.watch:
            self._watch_read(places, warp)
        return self.words[places]

    def store(self, addresses: Array, data: Array, active: Array) -> None:
        """Write [lanes, words] in lanes that are active."""
        claimed = self._claim(
            addresses, data, active, otherwise="shared memory is written while a copy into it is under way"
        )
        if claimed is not None:
            places, data, _ = claimed
            self.words[places] = data

    def copy(self, addresses: Array, data: Array, active: Array) -> None:
        """A copy of [lanes, words] that lands when its group is waited for; until then nobody may read the place."""
        claimed = self._claim(addresses, data, active, otherwise="a copy begins where another is under way")
        if claimed is not None:
            places = claimed[0]
            self.words[places] = 0xFFFFFFFF
            self.landing[places] = True
            self._pending.append(claimed)

    def _claim(
        self, addresses: Array, data: Array, active: Array, *, otherwise: str
    ) -> tuple[Array, Array, Array] | None:
        """(places, data, warps) of the lanes that may now write; None when no lane is active."""
        if not active.all():
            if not active.any():
                return None
            addresses, data = addresses[active], data[active]
        warp = self.warp[active]
        places = self._places(addresses, 4 * data.shape[1], warp)
        if self.landing[places].any():
            raise EmulatorError("unfinished copy", otherwise)
        if self.watch:
            self._watch_write(places, warp)
        return places, data, warp

    def commit(self) -> None:
        self._groups.append(self._pending)
        self._pending = []

    def wait(self, newest: int) -> None:
        """Let all groups land but the newest few. Other warps may read what landed after a barrier."""
        while len(self._groups) > newest:
            for places, data, warp in self._groups.pop(0):
                self.words[places] = data
                self.landing[places] = False
                if self.watch:
                    self.written[places] = self.epoch * EPOCH + warp[:, None]
