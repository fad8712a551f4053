"""What the kernels promise beyond right numbers: which bits never change, which rows are loud, where scratch lies."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mla import recall
from mla.backends.trtllm_gen import launch
from mla.backends.trtllm_gen.arguments import most_keys
from mla.backends.trtllm_gen.configurations import INTERPRETED, PIECE_KEYS
from mla.testing import Call, Case, assert_close, build

Decode = Callable[..., Any]
E4M3 = {"query": "float8_e4m3fn", "cache": "float8_e4m3fn"}
# Under coverage the interpreter takes twice as long: `no_cover` stands where other tests run the same lines.
PIECE = 256  # where pieces are short
LONG = 2 * PIECE + 70
MIXED = Case(lengths=(LONG, 3, 64, 0, PIECE, 129), heads=3, q_len=2, page_size=64, out="float32", lse_base="basee")
CUT = Case(lengths=(500, 3, 64, 0), heads=3, q_len=2, page_size=16, out="float32")  # two of them are cut among teams


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic mode cuts rows into pieces of `PIECE` keys: the interpreter is slow, and no step is another one."""
    assert PIECE < PIECE_KEYS
    monkeypatch.setattr("mla.backends.trtllm_gen.arguments.PIECE_KEYS", PIECE)


def bits(result: Any) -> list[torch.Tensor]:
    return [part.contiguous().view(torch.int32 if part.element_size() == 4 else torch.int16).clone() for part in result]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def rows_of(call: Call, *rows: int) -> dict[str, Any]:
    """The arguments of the call for some of its requests, in that order."""
    chosen = {name: call.arguments[name][list(rows)] for name in ("query", "block_tables", "seq_lens")}
    return call.arguments | chosen | {"out": None, "lse": None}


def row(result: Any, index: int, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one request."""
    out, lse = result
    return out[index], lse.view(-1, q_len, lse.shape[-1])[index]


# Bits that do not change.


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    "case",
    [
        MIXED,
        dataclasses.replace(MIXED, lengths=(LONG, 3, 0), top_k=PIECE + 40, slots="holes", q_len=1),
        dataclasses.replace(MIXED, lengths=(LONG, 40), sinks="normal", q_len=1, **E4M3),
    ],
    ids=["dense", "sparse", "e4m3"],
)
def test_deterministic_bits_depend_on_nothing_but_the_row(decode: Decode, case: Case) -> None:
    case = dataclasses.replace(case, out=None)
    call = build(case)
    whole = decode(**call.arguments, deterministic=True)
    assert_close(whole, call.problem)
    assert same(whole, decode(**call.arguments, deterministic=True))
    count = len(case.lengths)
    for index in (0, count - 1):
        alone = decode(**rows_of(call, index), deterministic=True)
        assert same(row(alone, 0, case.q_len), row(whole, index, case.q_len))
    turned = decode(**rows_of(call, *reversed(range(count))), deterministic=True)
    copies = decode(**rows_of(call, *[1] * 7, 0), deterministic=True)
    assert same(row(copies, 7, case.q_len), row(whole, 0, case.q_len))
    for index in range(count):
        assert same(row(turned, count - 1 - index, case.q_len), row(whole, index, case.q_len))
    for slack in (1, PIECE, 5 * PIECE + 1):
        bound = call.arguments["max_seq_len"] + slack
        assert same(whole, decode(**call.arguments | {"max_seq_len": bound}, deterministic=True))


@pytest.mark.usefixtures("short_pieces")
def test_a_wider_table_changes_no_deterministic_bit(decode: Decode) -> None:
    narrow, wide = (build(dataclasses.replace(MIXED, lengths=(LONG, 3), table_slack=slack)) for slack in (0, 90))
    assert same(decode(**narrow.arguments, deterministic=True), decode(**wide.arguments, deterministic=True))


@pytest.mark.usefixtures("short_pieces")
def test_a_row_is_cut_at_the_same_places_in_deterministic_mode_only(decode: Decode) -> None:
    """Otherwise teams share the work evenly, and a row's parts, and so its last bits, follow from its batch mates."""
    call = build(dataclasses.replace(MIXED, lengths=(LONG, 900, 900), q_len=1, out="float32"))
    apart = [decode(**rows_of(call, 0), deterministic=wanted) for wanted in (False, True)]
    whole = [decode(**rows_of(call, 0, 1, 2), deterministic=wanted) for wanted in (False, True)]
    assert [same(row(a, 0, 1), row(b, 0, 1)) for a, b in zip(apart, whole, strict=True)] == [False, True]


@pytest.mark.parametrize("case", [CUT, dataclasses.replace(CUT, top_k=150, slots="duplicates"), dataclasses.replace(CUT, **E4M3)], ids=["dense", "sparse", "e4m3"])  # fmt: skip
@pytest.mark.no_cover
def test_the_same_call_gives_the_same_bits_from_run_to_run(decode: Decode, case: Case) -> None:
    first = [part.clone() for part in build(case).run(decode)]
    for _ in range(2):
        assert same(first, build(case).run(decode))


@pytest.mark.parametrize("deterministic", [False, True])
def test_enable_pdl_changes_no_bit(decode: Decode, deterministic: bool) -> None:
    call = build(dataclasses.replace(CUT, out=None))
    results = [decode(**call.arguments, enable_pdl=pdl, deterministic=deterministic) for pdl in (None, True, False)]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_call_that_is_remembered_follows_lengths_tables_and_scales(decode: Decode, deterministic: bool) -> None:
    case = dataclasses.replace(CUT, out=None, lengths=(500, 3, 64, 0), scale_form="tensor", sinks="normal")
    shape = build(case)
    decode(**shape.arguments, deterministic=deterministic)
    other = build(dataclasses.replace(case, lengths=(480, 64, 0, 31), seed=3, bmm1=0.3, bmm2=-2.0))
    pool, table = shape.arguments["kv_cache"], shape.arguments["block_tables"]
    cache = torch.cat([other.arguments["kv_cache"], pool])[: len(pool)].clone()
    tables = torch.full_like(table, -1)
    tables[:, : other.arguments["block_tables"].shape[1]] = other.arguments["block_tables"]
    assert len(pool) >= len(other.arguments["kv_cache"])
    moved = other.arguments | {"kv_cache": cache, "block_tables": tables, "max_seq_len": 500}
    assert_close(decode(**moved, deterministic=deterministic), other.problem)


# Rows that are loud, and what stays quiet beside them.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("page", [-1, 1 << 20, 2**31 - 1, -(2**31)])
@pytest.mark.no_cover
def test_a_row_that_sees_a_page_outside_the_pool_is_nan_and_alone(
    decode: Decode, page: int, deterministic: bool
) -> None:
    call = build(dataclasses.replace(CUT, out=None))
    clean = decode(**call.arguments, deterministic=deterministic)
    for column in (0, 31):
        tables = call.arguments["block_tables"].clone()
        tables[0, column] = page
        sick = decode(**call.arguments | {"block_tables": tables}, deterministic=deterministic)
        assert row(sick, 0, 2)[0].isnan().all()
        assert row(sick, 0, 2)[1].isnan().all()
        assert all(same(row(sick, index, 2), row(clean, index, 2)) for index in (1, 2, 3))


def test_a_page_outside_the_pool_that_late_tokens_alone_see_is_nan_for_them_alone(decode: Decode) -> None:
    case = dataclasses.replace(CUT, out=None, lengths=(33, 5), q_len=3)  # position 32, in its own page, is the last
    call = build(case)
    clean = decode(**call.arguments)
    tables = call.arguments["block_tables"].clone()
    tables[0, 2] = -1
    sick = decode(**call.arguments | {"block_tables": tables})
    assert row(sick, 0, 3)[0][2].isnan().all()
    assert torch.equal(row(sick, 0, 3)[0][:2], row(clean, 0, 3)[0][:2])
    assert same(row(sick, 1, 3), row(clean, 1, 3))


def test_a_length_that_the_table_cannot_hold_is_nan_and_alone(decode: Decode) -> None:
    call = build(dataclasses.replace(CUT, out=None, q_len=1, table_slack=0))
    clean = decode(**call.arguments)
    for length in (513, 100_000, 2**31 - 1):
        lengths = torch.tensor([length, 3, 64, 0], dtype=torch.int32)
        sick = decode(**call.arguments | {"seq_lens": lengths})
        assert row(sick, 0, 1)[0].isnan().all()
        assert all(same(row(sick, index, 1), row(clean, index, 1)) for index in (2, 3))
        assert not row(sick, 1, 1)[0].isnan().any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [slice(0, 256), slice(256, 512), slice(3, 4)], ids=["left", "right", "one"])
@pytest.mark.no_cover
def test_what_is_not_finite_in_late_keys_stays_out_of_earlier_tokens(
    decode: Decode, part: slice, value: float, deterministic: bool
) -> None:
    case = dataclasses.replace(CUT, out=None, lengths=(70, 5, 34), q_len=4, scores="equal", values="ones")
    call = build(case)
    clean = decode(**call.arguments, deterministic=deterministic)
    for back in (1, 3):  # the last key, and the third but last
        cache = call.arguments["kv_cache"].clone()
        position = 70 - back
        cache[call.arguments["block_tables"][0, position // 16], position % 16, part] = value
        sick, _ = row(decode(**call.arguments | {"kv_cache": cache}, deterministic=deterministic), 0, 4)
        out, _ = row(clean, 0, 4)
        sees = slice(4 - back, None)
        assert torch.equal(sick[: 4 - back], out[: 4 - back])
        seen = sick[sees][..., part]
        # the query is all zeros, so that infinity * 0 makes the score NaN, and with it the whole row
        assert seen.isnan().all()


def test_infinite_late_values_under_ordinary_scores_are_infinite_for_those_who_see_them(decode: Decode) -> None:
    case = dataclasses.replace(CUT, out=None, lengths=(40,), q_len=3, heads=2, lse="none", query="float16", cache="float16")  # fmt: skip
    call = build(case)
    cache, query = call.arguments["kv_cache"].clone(), call.arguments["query"].clone()
    cache[call.arguments["block_tables"][0, 2], 7, 300] = math.inf  # position 39, of the last token alone
    query[..., 300] = 1e-7  # infinity times a number above zero: the score is infinite, its weight is NaN
    out = decode(**call.arguments | {"kv_cache": cache, "query": query})
    assert out[0, 2].isnan().all()
    assert out[0, :2].isfinite().all()


def test_an_infinite_late_value_does_what_the_definition_makes_of_it(decode: Decode) -> None:
    case = dataclasses.replace(CUT, out=None, lengths=(40,), q_len=3, heads=2)
    call = build(case)
    cache = call.arguments["kv_cache"].clone()
    cache[call.arguments["block_tables"][0, 2], 7, 5] = math.inf
    changed = dataclasses.replace(call.problem, kv_cache=cache)
    assert_close(decode(**call.arguments | {"kv_cache": cache}), changed)


# Scratch.


def scratch_bytes(call: Call, deterministic: bool) -> int:
    """What a launch asks of a workspace: parts and their lse, and room to begin at a multiple of 16 bytes."""
    problem = dataclasses.replace(call.problem, deterministic=deterministic)
    rows = (problem.batch, problem.q_len, problem.num_heads)
    made = launch.Launcher().find(problem, torch.empty(*rows, 512).bfloat16(), torch.empty(rows))
    return made.shape.part_rows(most_keys(problem)) * (512 + 1) * 4 + 15


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("deterministic", [False, True])
def test_scratch_lies_in_the_workspace_where_it_fits_and_changes_no_bit(decode: Decode, deterministic: bool) -> None:
    case = dataclasses.replace(CUT, out=None, lengths=(LONG, 70) if deterministic else (500, 70))
    call = build(case)
    expected = decode(**call.arguments, deterministic=deterministic)
    needed = scratch_bytes(call, deterministic)
    for size, skip, used in ((needed, 0, True), (needed - 1, 0, False), (needed + 64, 0, True), (needed + 3, 3, True), (0, 0, False)):  # fmt: skip
        whole = torch.full((size + 64,), 0xAB, dtype=torch.uint8)
        workspace = whole[skip : skip + size] if skip else whole[:size]
        got = decode(**call.arguments | {"workspace_buffer": workspace}, deterministic=deterministic)
        assert same(got, expected), (size, skip)
        assert (workspace != 0xAB).any() == used, (size, skip)
        begin = -workspace.data_ptr() % 16  # nothing before the first multiple of 16, nor behind what was asked for
        assert (workspace[:begin] == 0xAB).all()
        assert (workspace[begin + needed - 15 :] == 0xAB).all()
        assert (whole[skip + size :] == 0xAB).all()
        assert (whole[:skip] == 0xAB).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_workspace_of_any_dtype_is_used_as_bytes(decode: Decode, dtype: torch.dtype) -> None:
    call = build(dataclasses.replace(CUT, out=None))
    workspace = torch.zeros(scratch_bytes(call, False) // dtype.itemsize + 2, dtype=dtype)
    assert same(decode(**call.arguments), decode(**call.arguments | {"workspace_buffer": workspace}))
    assert workspace.view(torch.uint8).any()


def test_scratch_of_deterministic_mode_grows_with_the_bound_and_the_other_s_does_not() -> None:
    short, long = (build(dataclasses.replace(CUT, max_slack=slack, table_slack=4000)) for slack in (0, 50_000))
    assert scratch_bytes(short, False) == scratch_bytes(long, False)
    assert scratch_bytes(short, True) < scratch_bytes(long, True)


def owned(value: torch.Tensor) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A copy in memory of its own, and a reference that dies with that memory."""
    memory = np.zeros(value.nbytes, dtype=np.uint8)
    copy = torch.from_numpy(memory).view(value.dtype).view(value.shape)
    return copy.copy_(value), weakref.ref(memory)


def test_what_is_remembered_keeps_no_memory_of_the_call_alive(decode: Decode) -> None:
    case = dataclasses.replace(
        CUT, out="bfloat16", lse="rows", sinks="normal", workspace="noise", scale_form="tensor4d"
    )
    arguments = build(case).arguments
    memory: dict[str, weakref.ref[Any]] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name], memory[name] = owned(value.contiguous())
    known = len(recall._seen)
    decode(**arguments)
    assert len(recall._seen) == known + 1
    assert all(reference() is not None for reference in memory.values())
    del arguments, value
    gc.collect()
    assert [name for name, reference in memory.items() if reference() is not None] == []


# Shapes at the edges of tiles.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (16, 1), (17, 1), (16, 2), (33, 1), (64, 1), (65, 1), (5, 13)])
def test_rows_at_the_edges_of_tiles_are_right(decode: Decode, heads: int, q_len: int, deterministic: bool) -> None:
    assert {16, 32, 64} == set(INTERPRETED)
    call = build(Case(lengths=(40, 3), heads=heads, q_len=q_len, page_size=16, sinks="normal", workspace="ones"))
    assert_close(decode(**call.arguments, deterministic=deterministic), call.problem)
    assert call.disturbed() == []


@pytest.mark.parametrize("length", [PIECE_KEYS - 1, PIECE_KEYS, PIECE_KEYS + 1, 2 * PIECE_KEYS + 1])
@pytest.mark.no_cover
def test_rows_at_the_edges_of_pieces_are_right(decode: Decode, length: int) -> None:
    for changes in ({}, {"q_len": 3}, {"top_k": length}):
        call = build(Case(lengths=(length, 1), heads=2, out="float32", **changes))
        assert_close(decode(**call.arguments, deterministic=True), call.problem)


def test_more_requests_than_are_looked_at_together_are_right(decode: Decode) -> None:
    lengths = tuple((7 * b) % 23 for b in range(40))
    call = build(Case(lengths=lengths, heads=1, page_size=16))
    for deterministic in (False, True):
        assert_close(decode(**call.arguments, deterministic=deterministic), call.problem)
