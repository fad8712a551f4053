"""Sizes that are fixed ahead of time: tiles of every chip, merge programs, grids, scratch and what is constant."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

import mla
from mla.backends.trtllm_gen import backend
from mla.backends.trtllm_gen import configurations as c
from mla.backends.trtllm_gen.configurations import merge_for, tile_for
from mla.dispatch import AUTO_ORDER
from mla.testing import Case, build

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CHIPS = sorted(AUTO_ORDER)
E4M3 = {"query": "float8_e4m3fn", "cache": "float8_e4m3fn"}


def on(chip: tuple[int, int] | None, **case: Any) -> mla.Problem:
    """A problem as it would be on that chip; nothing is on a GPU."""
    device = torch.device("cpu" if chip is None else "cuda:0")
    return dataclasses.replace(build(Case(**case)).problem, device=device, capability=chip)


# Tiles.


@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_every_chip_has_a_tile_for_any_number_of_rows(chip: tuple[int, int], size: int) -> None:
    for rows in (1, 15, 16, 17, 32, 33, 64, 65, 128, 1170):
        for hopper in (False, True):
            tile = tile_for(chip, rows, size, hopper)
            assert tile.rows in (16, 32, 64)
            assert tile.rows >= min(rows, 32)
            assert tile.rows == 16 or tile.rows < 2 * rows  # no more than needed
            assert bool(tile.hopper) == (hopper and chip == (9, 0))


def test_no_tile_of_64_rows_goes_to_data_center_blackwell() -> None:
    """Scores and output of 64 rows need more columns of tensor memory than there are."""
    for chip in ((10, 0), (10, 3)):
        assert {tile_for(chip, rows, size).rows for rows in (64, 128, 999) for size in (1, 2)} == {32}


def test_hopper_s_own_kernel_gets_all_that_is_aligned() -> None:
    for rows in (16, 32, 64):
        for size in (1, 2):
            tile = tile_for((9, 0), rows, size, hopper=True)
            assert tile.hopper
            assert tile.rows == rows


def test_pieces_of_deterministic_mode_are_whole_blocks_and_every_tile_is_a_power_of_two() -> None:
    tables = [
        *c._BY_CHIP.values(),
        (c._HOPPER_16, c._HOPPER_8),
        (c.INTERPRETED,),
    ]
    for height, tile in (pair for tiles in tables for table in tiles for pair in table.items()):
        assert height == tile.rows
        assert c.PIECE_KEYS % tile.keys == 0
        assert all(number & (number - 1) == 0 for number in (tile.rows, tile.keys, tile.warps))
        assert tile.stages >= 1


def test_chips_that_are_not_compiled_for_ahead_of_time_share_the_tiles_of_one_that_is() -> None:
    assert c._BY_CHIP[8, 7] == c._BY_CHIP[8, 0]
    assert c._BY_CHIP[8, 6] == c._BY_CHIP[8, 9]
    assert c._BY_CHIP[12, 1] == c._BY_CHIP[12, 0]


@needs_triton
@pytest.mark.parametrize("chip", CHIPS, ids=str)
def test_what_is_listed_for_a_chip_is_what_its_calls_get(chip: tuple[int, int]) -> None:
    from mla.backends.trtllm_gen.arguments import options_of

    listed = c.shipped(chip)
    assert len({one.name for one in listed}) == len(listed)
    assert any("e4m3" in one.name for one in listed) == (chip >= (8, 9))
    assert any("Hopper" in one.name for one in listed) == (chip == (9, 0))
    for one in listed:
        module, _, name = one.kernel_ref.partition(":")
        assert module == f"mla.backends.trtllm_gen.{name}"
        assert (one.constants["PDL"], one.options["launch_pdl"]) == (chip >= (9, 0), chip >= (9, 0))
        if name == "hopper_kernel":
            call = shape(chip, heads=one.constants["HEADS"], q_len=one.constants["Q_LEN"], page_size=one.constants["PAGE"], top_k=8 * one.constants["SPARSE"], **(E4M3 if "e4m3" in one.name else {}))  # fmt: skip
            same = ("BM", "STAGES", "PIECE", "OVERHEAD", "TOKEN", "Q_PLACES", "REGISTERS", "BOXES")
            assert {key: one.constants[key] for key in same} == {key: call.decode_constants[key] for key in same}
            assert (one.num_warps, one.options) == (call.tile.warps, options_of(call.tile, pdl=True))
        if name == "decode_kernel":
            call = shape(chip, heads=one.constants["HEADS"], q_len=one.constants["Q_LEN"], aligned=chip != (9, 0), top_k=8 * one.constants["SPARSE"], **(E4M3 if "e4m3" in one.name else {}))  # fmt: skip
            same = ("BM", "BN", "STAGES", "LATE", "PIECE", "OVERHEAD", "TOKEN", "ALIGN" if chip != (9, 0) else "BM")
            assert {key: one.constants[key] for key in same} == {key: call.decode_constants[key] for key in same}
            assert one.num_warps == call.tile.warps


# Merging.


@pytest.mark.parametrize("rows", [1, 256, 1055, 1056, 4095, 4096, 1 << 20])
@pytest.mark.parametrize("parts", [1, 5, 6, 11, 12, 23, 24, 95, 96, 132])
def test_a_merge_program_works_on_powers_of_two_that_fit_in_registers(rows: int, parts: int) -> None:
    merge = merge_for(rows, parts, False)
    assert all(number & (number - 1) == 0 for number in (merge.rows, merge.cols, merge.parts))
    assert 512 % merge.cols == 0
    assert merge.parts * merge.rows * merge.cols <= 64 * 32 * merge.warps  # fp32 numbers of one step, 64 a thread


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16, 33, 66, 132])
def test_parts_of_which_a_row_has_many_are_read_in_few_steps(parts: int) -> None:
    merge = merge_for(256, parts, False)
    assert parts <= 3 * merge.parts
    assert merge.parts <= 4 * parts or merge.cols == 512  # and threads are not left idle


def test_merging_in_deterministic_mode_is_the_same_for_any_number_of_rows_and_parts() -> None:
    assert len({merge_for(rows, parts, True) for rows in (1, 300, 5000, 1 << 20) for parts in (1, 8, 132)}) == 1


# Launches.


def shape(chip: tuple[int, int] | None = (9, 0), *, sms: int = 132, aligned: bool = True, **changes: Any) -> Any:
    from mla.backends.trtllm_gen.arguments import shape_of

    flags = {name: changes.pop(name) for name in ("deterministic", "max_seq_len") if name in changes}
    problem = dataclasses.replace(on(chip, **{"lse": "none"} | changes), **flags)
    out = torch.empty(problem.batch, problem.q_len, problem.num_heads, 512, dtype=problem.out_dtype)
    lse = torch.empty(out.shape[:-1]) if problem.wants_lse else None
    return shape_of(problem, out, lse, sms=sms, pdl=False, aligned=aligned)


@needs_triton
@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("heads", [1, 16, 17, 32, 40, 128])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("top_k", [0, 8])
def test_a_grid_covers_all_rows_and_leaves_no_multiprocessor_twice(
    chip: tuple[int, int], heads: int, q_len: int, top_k: int
) -> None:
    made = shape(chip, lengths=(9, 20, 3), heads=heads, q_len=q_len, top_k=top_k)
    rows = heads if top_k else heads * q_len
    assert made.items == (3 * q_len if top_k else 3)
    assert (made.tiles - 1) * made.tile.rows < rows <= made.tiles * made.tile.rows
    assert made.decode_grid == made.teams * made.tiles <= max(132, made.tiles)
    assert made.decode_grid > 132 - made.tiles or made.teams == 1
    merged = made.merge_grid * made.merge.rows * made.merge.cols // 512
    assert merged >= rows * min(made.items, made.teams)


@needs_triton
def test_two_programs_of_small_e4m3_tiles_share_one_of_hopper_s_multiprocessors() -> None:
    made = shape(lengths=(300,) * 7, heads=16, **E4M3)
    assert made.tile.hopper.programs == 2
    assert made.decode_grid == made.teams == 264
    assert made.parts == 528
    threads = (made.tile.warps + 4) * 32
    assert 2 * threads * made.tile.hopper.launch_registers <= 65536
    assert (
        shape(lengths=(300,) * 7, heads=16).decode_grid
        == shape(lengths=(300,) * 7, heads=32, **E4M3).decode_grid
        == 132
    )


@needs_triton
def test_merge_programs_follow_the_fewer_of_items_and_teams() -> None:
    few, many = (shape(lengths=(9,) * batch, heads=16) for batch in (100, 300))
    assert (few.merge_constants["BY_TEAM"], many.merge_constants["BY_TEAM"]) == (False, True)
    per = {made.merge_grid // -(-16 // made.merge.rows) // (512 // made.merge.cols) for made in (few, many)}
    assert per == {100, 132}
    fixed = shape(lengths=(9,) * 300, heads=16, deterministic=True)
    assert not fixed.merge_constants["BY_TEAM"]
    assert fixed.merge_grid == 300 * 16 * 4


@needs_triton
def test_scratch_holds_two_parts_of_each_team_whatever_the_batch() -> None:
    for batch, slack in ((1, 0), (300, 0), (3, 1 << 20)):
        made = shape(lengths=(9,) * batch, heads=16, max_slack=slack)
        assert made.part_rows(123) == made.part_rows(1 << 30) == 2 * 132 * 16
    assert shape(lengths=(9,), heads=40).part_rows(9) == 2 * 132 * 64


@needs_triton
def test_scratch_of_deterministic_mode_holds_every_piece_of_every_item() -> None:
    made = shape(lengths=(9, 20, 3), heads=16, deterministic=True)
    for most, pieces in ((0, 1), (1, 1), (2048, 1), (2049, 2), (4096, 2), (4097, 3)):
        assert made.part_rows(most) == 3 * pieces * 16


@needs_triton
@pytest.mark.parametrize(("items", "scan", "once"), [(1, 32, True), (32, 32, True), (33, 256, True), (256, 256, True), (257, 1024, True), (1024, 1024, True), (1025, 1024, False)])  # fmt: skip
def test_items_are_looked_at_together_in_few_sizes(items: int, scan: int, once: bool) -> None:
    made = shape(lengths=(2,) * items, heads=1, page_size=2)
    for constants in (made.decode_constants, made.merge_constants):
        assert (constants["SCAN"], constants["ONCE"]) == (scan, once)


@needs_triton
def test_only_what_the_code_depends_on_is_constant() -> None:
    """B, W, N and max_seq_len are passed; so one compiled kernel serves them all."""
    base = dict(lengths=(9, 20), heads=16, page_size=16)
    first = shape(**base)
    others = [dict(lengths=(90, 2, 3, 4, 5)), dict(table_slack=50), dict(max_slack=1 << 20), dict(spare_pages=40)]
    for change in others:
        other = shape(**base | change)
        assert other.decode_constants == first.decode_constants
        assert other.merge_constants == first.merge_constants
        assert (other.tile, other.decode_grid) == (first.tile, first.decode_grid)
    assert shape(**base | dict(page_size=8)).decode_constants != first.decode_constants


@needs_triton
def test_the_bound_on_keys_is_k_or_one_more_than_the_table_holds() -> None:
    from mla.backends.trtllm_gen.arguments import most_keys

    dense = on((9, 0), lengths=(100,), page_size=16, table_slack=1)  # 7 columns and a spare one
    assert most_keys(dense) == 8 * 16 + 1
    assert most_keys(dataclasses.replace(dense, max_seq_len=100, deterministic=True)) == 100
    assert most_keys(dataclasses.replace(dense, max_seq_len=1 << 30, deterministic=True)) == 8 * 16 + 1
    assert most_keys(on((9, 0), lengths=(100,), top_k=24)) == 24
    wide = dataclasses.replace(dense, block_tables=torch.empty(1, 1 << 20, device="meta"), page_size=1 << 20)
    assert 0 < most_keys(wide) + 4095 < 1 << 31  # rounding up to a block stays within 32 bits


@needs_triton
@pytest.mark.parametrize("layout", ["query_layout", "cache_layout", "out_layout"])
def test_alignment_is_that_of_addresses_and_of_strides(layout: str) -> None:
    from mla.backends.trtllm_gen.arguments import is_aligned

    def aligned(**changes: Any) -> bool:
        problem = on(None, lengths=(9, 20), q_len=2, heads=3, out="bfloat16", **changes)
        assert problem.out is not None
        return is_aligned(problem, problem.out)

    assert aligned()
    assert not aligned(**{layout: "offset"})
    odd = torch.empty(2, 2, 3, 577, dtype=torch.bfloat16)[..., :576]
    problem = on(None, lengths=(9, 20), q_len=2, heads=3, out="bfloat16")
    assert problem.out is not None
    assert not is_aligned(dataclasses.replace(problem, query=odd), problem.out)


@needs_triton
def test_unaligned_tensors_on_hopper_get_the_portable_kernel_without_assumptions() -> None:
    for made, hopper in ((shape(), True), (shape(aligned=False), False), (shape(query="bfloat16", cache="float8_e4m3fn"), False)):  # fmt: skip
        assert bool(made.tile.hopper) == hopper
    constants = shape(aligned=False).decode_constants
    assert [constants[name] for name in ("ALIGN", "Q_ALIGN", "OUT_ALIGN")] == [1, 1, 1]
    constants = shape((8, 0)).decode_constants
    assert [constants[name] for name in ("ALIGN", "Q_ALIGN", "OUT_ALIGN")] == [8, 8, 8]


@needs_triton
def test_a_first_launch_in_a_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reached without a GPU: sizes are worked out first, and nothing is compiled."""
    from mla.backends.trtllm_gen import launch

    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    problem = on((9, 0))
    with pytest.raises(RuntimeError, match=r"captured into a CUDA graph.*call mla.warmup\(\.\.\.\) with the same"):
        backend.warmup(problem, torch.empty(1, 1, 16, 512), None)
