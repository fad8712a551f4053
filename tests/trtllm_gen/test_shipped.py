"""The shipped kernels, compiled for every chip with no GPU: they fit, and use the tensor cores in the way that is meant."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

CHIPS = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
# What multiplies, by chip and kind of kernel. Tiles below 64 rows are mma.sync, but where operands are swapped (Hopper).
INSTRUCTION = {
    "Hopper bf16": "HGMMA",
    "Hopper e4m3": "QGMMA",
    "portable bf16": "HMMA",
    "portable e4m3": "HMMA",
}


def wanted(name: str) -> bool:
    """Of every chip's list: one query token, dense, each way of merging that is not like another, and all for Hopper."""
    dense = "sparse" not in name and "Q = 2" not in name
    return (dense and "merge" not in name) or name.startswith(("Hopper", "merge, 128", "merge, 4 parts x 4"))


@pytest.fixture(scope="module", params=CHIPS, ids=lambda chip: f"sm_{chip[0]}{chip[1]}")
def codes(request: pytest.FixtureRequest) -> Any:
    from mla.backends.trtllm_gen.configurations import shipped
    from mla.backends.trtllm_gen.machine_code import compile_all, job_of

    chip = request.param
    jobs = [job_of(one, chip) for one in shipped(chip) if wanted(one.name)]
    assert len(jobs) >= 4
    return compile_all(jobs, processes=2)


def test_each_compiles_and_fits_the_chip(codes: Any) -> None:
    for code in codes:
        assert code.error == "", f"{code.name}: {code.error}"
        assert code.fits, f"{code.name}: {code.shared_bytes} bytes of shared memory"
        assert code.registers > 16, f"{code.name} is no code at all"


def test_programs_that_share_a_multiprocessor_fit_beside_each_other(codes: Any) -> None:
    """An H100 or H200 has 228 KiB of shared memory in a multiprocessor, of which a program takes 1 KiB more than it asks for."""
    for code in codes:
        if code.name.startswith("Hopper e4m3, 16 rows"):
            assert 2 * (code.shared_bytes + 1024) <= 228 * 1024, code.name


def test_each_multiplies_on_the_tensor_cores(codes: Any) -> None:
    for code in codes:
        if code.name.startswith("merge"):
            continue
        kind = " ".join(code.name.split(",")[0].split()[:2])
        classes = {opcode.partition(".")[0] for opcode in code.matrix_instructions}
        expected = "HGMMA" if code.chip == (9, 0) and "64 rows" in code.name else INSTRUCTION[kind]
        assert expected in classes, f"{code.name}: {classes}"
        assert code.instructions["LDGSTS"] > 0, f"{code.name} loads keys through registers"
        boxed = code.name.startswith("Hopper") and "sparse" not in code.name and "pages of" not in code.name
        assert bool(code.instructions.get("UTMALDG")) == boxed, code.name


def test_e4m3_scores_use_the_e4m3_instruction_where_the_chip_has_one_for_such_tiles(codes: Any) -> None:
    for code in codes:
        if "e4m3" in code.name and code.chip in ((8, 9), (9, 0), (12, 0)):
            assert any(name.startswith(("QMMA", "QGMMA")) for name in code.matrix_instructions), code.name


def test_no_matrix_instruction_waits_for_another_without_need(codes: Any) -> None:
    assert {code.name: code.serialized for code in codes if code.serialized} == {}


def test_tiles_of_sixteen_rows_and_merges_spill_nothing(codes: Any) -> None:
    spilling = [code.name for code in codes if code.spills and ("16 rows" in code.name or "merge" in code.name)]
    assert spilling == []


def test_hopper_s_own_kernels_spill_next_to_nothing_in_their_loops(codes: Any) -> None:
    """The loading warps of 64 rows have 40 registers, and fetch two spilled ones a block that they load by rows."""
    counts = {code.name: code.loop_spills for code in codes if code.name.startswith("Hopper")}
    assert all(count <= 2 * ("64 rows" in name) for name, count in counts.items()), counts


def test_rows_are_stored_many_bytes_at_a_time(codes: Any) -> None:
    """Number by number, as a compiler stores what it does not know to be aligned, 64 rows of 512 took 14 us on an H200."""
    narrow = {code.name: code.narrow_stores for code in codes if "merge, 128" not in code.name}  # that has 64 columns
    assert {name: count for name, count in narrow.items() if count} == {}


def test_no_warp_that_is_late_reads_what_was_handed_over_to_others(codes: Any) -> None:
    """One that did took another part of the keys than the rest, or none, and its program never ended."""
    assert {code.name: code.unguarded for code in codes if code.unguarded} == {}
    if codes[0].chip == (9, 0):
        assert any(code.instructions["USETMAXREG"] for code in codes), "no kernel hands over to groups of warps"


def test_hopper_s_own_kernel_compiles_for_every_number_of_heads_and_query_tokens() -> None:
    """Where an item has one row, the compiler folds the addresses of queries to one, and once forgot that they are aligned."""
    from mla.backends.trtllm_gen.arguments import ahead_of_time
    from mla.backends.trtllm_gen.configurations import tile_for
    from mla.backends.trtllm_gen.machine_code import compile_all, job_of

    jobs = []
    for dtype, size in (("bf16", 2), ("fp8e4nv", 1)):
        for heads, q_len, sparse in (
            (1, 1, True),
            (1, 1, False),
            (1, 3, True),
            (1, 3, False),
            (17, 2, True),
            (3, 5, False),
        ):
            rows = heads if sparse else heads * q_len
            tile = tile_for((9, 0), rows, size, hopper=True)
            for page_size in (16,) if sparse else (16, 128):
                made = ahead_of_time((9, 0), tile, dtype, heads=heads, q_len=q_len, sparse=sparse, page_size=page_size)
                jobs.append(job_of(dataclasses.replace(made, name=f"{made.name}, H = {heads}"), (9, 0)))
    codes = compile_all(jobs, processes=2)
    assert {code.name: code.error for code in codes if code.error or not code.fits} == {}
    assert {code.name: code.unguarded for code in codes if code.unguarded} == {}
