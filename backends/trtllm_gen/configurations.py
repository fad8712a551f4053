"""Tile sizes per chip, fixed ahead of time: chosen by shared memory, registers and measurement, never while running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Chip = tuple[int, int]

PIECE_KEYS = 2048  # keys per piece in deterministic mode
OVERHEAD = 1  # units that an item costs besides its blocks
SCANS = (32, 256, 1024)  # items that the plan looks at together; more are looked at in turns


@dataclass(frozen=True)
class Hopper:
    """How threads of the Gluon kernel share registers, and what shared memory holds.

    Attributes:
        load_registers: of each thread that loads; those that compute get what is left.
        launch_registers: of each thread at first, 0 for as many as there are. With fewer, programs of the merge kernel
            fit beside and are ready when the decode kernel ends.
        query_places: row tiles of queries in shared memory; with two, an item's are loaded before its turn comes.
        value_keys: keys of a block of e4m3 whose values are widened together, in registers.
        programs: on a multiprocessor at a time.
    """

    load_registers: int
    launch_registers: int = 0
    query_places: int = 1
    value_keys: int = 64
    programs: int = 1


@dataclass(frozen=True)
class Tile:
    """How one decode program works.

    Attributes:
        rows: BM, query vectors of a tile.
        keys: BN, keys of a block.
        warps, stages: of the launch (those that compute, if others only load) and of the load pipeline.
        hopper: what the Gluon kernel needs to know besides; None for the portable kernel.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    hopper: Hopper | None = None


# Shared memory of one block and registers decide the portable tiles. Tiles of 64 rows would use tcgen05 on sm_100, but
# scores and output together need more columns of tensor memory than it has: there, 32 rows are the most.
_LARGE_16 = {16: Tile(16, 64, 8, 5), 32: Tile(32, 64, 8, 5), 64: Tile(64, 64, 8, 3)}
_BLACKWELL_16 = {16: Tile(16, 64, 8, 5), 32: Tile(32, 64, 8, 5)}
_MEDIUM_16 = {16: Tile(16, 64, 8, 3), 32: Tile(32, 32, 8, 4), 64: Tile(64, 32, 8, 3)}
_SMALL_16 = {16: Tile(16, 64, 8, 3), 32: Tile(32, 32, 8, 4), 64: Tile(64, 16, 8, 4)}
_LARGE_8 = {16: Tile(16, 32, 8, 5), 32: Tile(32, 32, 8, 4), 64: Tile(64, 64, 8, 2)}
_BLACKWELL_8 = {16: Tile(16, 32, 8, 5), 32: Tile(32, 32, 8, 4)}
_SMALL_8 = {16: Tile(16, 32, 8, 4), 32: Tile(32, 32, 8, 4), 64: Tile(64, 32, 8, 3)}
_HOPPER_16 = {
    16: Tile(16, 64, 4, 2, Hopper(104, launch_registers=184, query_places=2)),
    32: Tile(32, 64, 8, 2, Hopper(40, launch_registers=152)),
    64: Tile(64, 64, 8, 2, Hopper(40)),
}
_HOPPER_8 = {
    16: Tile(16, 64, 4, 2, Hopper(56, launch_registers=128, value_keys=16, programs=2)),
    32: Tile(32, 64, 8, 5, Hopper(40, value_keys=32)),
    64: Tile(64, 64, 8, 3, Hopper(40, value_keys=16)),
}

_BY_CHIP: dict[Chip, tuple[dict[int, Tile], dict[int, Tile]]] = {
    (8, 0): (_MEDIUM_16, _SMALL_8),
    (8, 6): (_SMALL_16, _SMALL_8),
    (8, 7): (_MEDIUM_16, _SMALL_8),
    (8, 9): (_SMALL_16, _SMALL_8),
    (9, 0): (_LARGE_16, _LARGE_8),
    (10, 0): (_BLACKWELL_16, _BLACKWELL_8),
    (10, 3): (_BLACKWELL_16, _BLACKWELL_8),
    (12, 0): (_SMALL_16, _SMALL_8),
    (12, 1): (_SMALL_16, _SMALL_8),
}
INTERPRETED = {16: Tile(16, 32, 4, 1), 32: Tile(32, 32, 4, 1), 64: Tile(64, 32, 4, 1)}


def tile_for(chip: Chip | None, rows: int, cache_bytes: int, hopper: bool = False) -> Tile:
    """The tile for items of `rows` query vectors over a cache of `cache_bytes` per number.

    `chip` None is Triton's interpreter. `hopper`: whether Hopper's own kernel may run.
    """
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if chip is None:
        return INTERPRETED[height]
    if chip == (9, 0) and hopper:
        return (_HOPPER_8 if cache_bytes == 1 else _HOPPER_16)[height]
    two_bytes, one_byte = _BY_CHIP[chip]
    tiles = two_bytes if cache_bytes == 2 else one_byte
    return tiles.get(height, tiles[32])


@dataclass(frozen=True)
class Merge:
    """How one merge program works: `rows` rows, `cols` of their columns, `parts` parts at a time."""

    rows: int
    cols: int
    parts: int
    warps: int


_MANY_PARTS = (
    (96, Merge(1, 64, 128, 4)),
    (24, Merge(1, 256, 32, 4)),
    (12, Merge(1, 256, 16, 4)),
    (6, Merge(1, 512, 8, 4)),
)
"""From so many parts of a row on, it is merged so: the more parts at a time, the fewer of their columns."""


def merge_for(rows: int, parts: int, deterministic: bool) -> Merge:
    """For so many rows in all, of about so many parts each; in deterministic mode, the same for any."""
    if deterministic:
        return Merge(1, 128, 16, 4)
    for least, merge in _MANY_PARTS:
        if parts >= least:
            return merge
    if rows < 1056:
        return Merge(1, 512, 4, 2)
    return Merge(4, 512, 4, 4) if rows < 4096 else Merge(8, 512, 2, 4)


@dataclass(frozen=True)
class Shipped:
    """A configuration as `machine_code` compiles it."""

    name: str
    kernel_ref: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)


def shipped(chip: Chip) -> list[Shipped]:
    """The configurations that the chip gets for the common calls, for looking at their machine code."""
    return list(_shipped(chip))


def _shipped(chip: Chip) -> Iterator[Shipped]:
    from mla.backends.trtllm_gen.arguments import ahead_of_time  # it needs Triton

    for dtype, size in (("bf16", 2), ("fp8e4nv", 1)):
        if dtype == "fp8e4nv" and chip < (8, 9):
            continue
        kinds: list[dict[str, Any]] = [dict(heads=16, q_len=1), dict(heads=16, q_len=2), dict(heads=128, q_len=1)]
        if chip == (9, 0):
            kinds += [dict(heads=heads, q_len=1, page_size=16) for heads in (16, 128)]
        kinds.append(dict(heads=128, q_len=1, sparse=True))
        for kind in kinds:
            tile = tile_for(chip, kind["heads"] * kind["q_len"], size, hopper=True)
            yield ahead_of_time(chip, tile, dtype, **kind)
    if chip == (9, 0):
        yield ahead_of_time(chip, tile_for(chip, 16, 2), "bf16", heads=16, q_len=1)
        yield ahead_of_time(chip, tile_for(chip, 128, 2), "bf16", heads=128, q_len=1)
        yield ahead_of_time(chip, tile_for(chip, 128, 1), "fp8e4nv", heads=128, q_len=1)
    for rows, parts in ((16, 132), (32, 66), (128, 16), (256, 8), (512, 4), (2048, 2), (8192, 1)):
        yield ahead_of_time(chip, merge_for(rows, parts, False), "bf16", heads=16, q_len=1)
