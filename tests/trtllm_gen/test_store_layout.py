"""In which layout Hopper's kernel stores rows: the tensor cores' own, but for one exchange within a warp."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

COLUMNS, SWAPPED = 1, 0  # the axis of the columns
# Bases of the column and of the row that registers, lanes and warps hold: 64 rows, 16 rows swapped, 16 rows of e4m3.
LAYOUTS = {
    "64 rows": (COLUMNS, [(1, 0), (0, 8), (8, 0), (16, 0), (32, 0), (64, 0), (128, 0)], [(2, 0), (4, 0), (0, 1), (0, 2), (0, 4)], [(0, 16), (0, 32), (256, 0)]),
    "16 rows": (SWAPPED, [(0, 1), (8, 0), (0, 8), (64, 0), (128, 0), (256, 0)], [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)], [(16, 0), (32, 0)]),
    "16 rows of e4m3": (SWAPPED, [(1, 0), (0, 1), (16, 0), (0, 8), (128, 0), (256, 0)], [(0, 2), (0, 4), (2, 0), (4, 0), (8, 0)], [(32, 0), (64, 0)]),
}  # fmt: skip


@pytest.fixture(params=LAYOUTS, ids=str)
def before_and_after(request: pytest.FixtureRequest) -> tuple[int, Any, Any]:
    from triton.experimental.gluon import language as gl

    from mla.backends.trtllm_gen.hopper_computing_kernel import store_layout

    axis, *held = LAYOUTS[request.param]
    registers, lanes, warps = ([[c, r] if axis == SWAPPED else [r, c] for c, r in bases] for bases in held)
    shape = [2 ** sum(bool(base[i]) for base in registers + lanes + warps) for i in (0, 1)]
    assert shape[axis] == 512
    layout = gl.DistributedLinearLayout(registers, lanes, warps, [], shape)
    return axis, layout, store_layout(layout, axis == SWAPPED)


def test_every_number_stays_in_its_warp_and_is_held_once(before_and_after: tuple[int, Any, Any]) -> None:
    _, before, after = before_and_after
    assert after.warp_bases == before.warp_bases
    assert after.shape == before.shape
    assert sorted(after.reg_bases + after.lane_bases) == sorted(before.reg_bases + before.lane_bases)


def test_one_bit_is_exchanged(before_and_after: tuple[int, Any, Any]) -> None:
    _, before, after = before_and_after
    assert sum(a != b for a, b in zip(before.lane_bases, after.lane_bases, strict=True)) == 1


def test_a_thread_has_twice_as_many_columns_together_and_a_warp_16_of_them(
    before_and_after: tuple[int, Any, Any],
) -> None:
    axis, before, after = before_and_after

    def together(bases: list[list[int]]) -> int:
        held = {base[axis] for base in bases if base[axis]}
        return next(size for size in (1 << bit for bit in range(10)) if size not in held)

    assert together(after.reg_bases) == 2 * together(before.reg_bases)
    assert together(after.reg_bases + after.lane_bases) >= 16
    wide = together(after.reg_bases)
    assert [base[axis] for base in after.reg_bases[: wide.bit_length() - 1]] == [
        1 << bit for bit in range(wide.bit_length() - 1)
    ]
