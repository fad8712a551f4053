"""Bugs of the kind that kernels really have, planted one by one: the emulator or the judge must find each.

A bug is one edit in the source of one function of the kernels. The same cases pass without it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest

from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.kernel import attend, decode, memory, merge, schedule
from mla.backends.xqa.plan import Machine
from mla.testing import Case, Mismatch, judges

RAGGED = Case(lengths=(150, 0, 77), heads=12, page_size=16)
TWO_TOKENS = Case(lengths=(70, 33), q_len=2, heads=6, page_size=16, out="float32")
MANY_TOKENS = Case(lengths=(37, 4), q_len=4, heads=4, page_size=16)
E4M3 = Case(lengths=(150, 77), heads=20, query="float8_e4m3fn", cache="float8_e4m3fn", scores="peaked", out="float32")
ON_E4M3 = Case(lengths=(90,), heads=4, query="bfloat16", cache="float8_e4m3fn", scores="peaked", out="float32")
LATER = Case(lengths=(150, 0, 77), heads=20, query="bfloat16", cache="float8_e4m3fn")
NOTHING_LATER = Case(lengths=(0, 40), heads=20, query="bfloat16", cache="float8_e4m3fn")
TOKENS_LATER = Case(lengths=(6, 9, 12), q_len=4, heads=8, page_size=16, query="bfloat16", cache="float8_e4m3fn")
WIDE = Case(lengths=(200, 40), heads=40, page_size=16, out="float32")
SINKS = Case(lengths=(150, 20), heads=4, sinks="normal", out="float32")
SPARSE = Case(lengths=(90, 40), q_len=2, heads=4, top_k=48, slots="holes")
OFFSET = Case(lengths=(40,), heads=4, cache_layout="offset")
ONE_TEAM = (("teams", 1),)
ON_HOPPER = (("machine", Machine((9, 0), 4)),)
HALVES = Case(lengths=(70,), heads=40, page_size=16)
FAR = Case(lengths=(70,), heads=4, far_pages=30_000, tail="zero")


@dataclass(frozen=True)
class Bug:
    """What is wrong, where (module, function), the edit, the case that shows it, and how it is found."""

    name: str
    module: ModuleType
    function: str
    old: str
    new: str
    case: Case
    found: str
    options: tuple[tuple[str, Any], ...] = ()  # of the emulated backend


BUGS = (
    Bug("a tile is not waited for", decode, "attend", "wait_for_tile()", "pass", RAGGED, "unfinished copy"),
    Bug("no barrier after the wait", decode, "attend", "else:\n            barrier()\n        first", "else:\n            pass\n        first", RAGGED, "race"),
    Bug("no barrier after the wait, values later", decode, "attend", "rescale = barrier_any(changed)\n        else:", "rescale = 1\n        else:", LATER, "race"),
    Bug("no barrier before the softmax", decode, "attend", "partial_scores(keys, words, places)\n        barrier()", "partial_scores(keys, words, places)", RAGGED, "race"),
    Bug("no barrier before the values", decode, "attend", "rescale = barrier_any(changed)\n            add_values", "rescale = 1\n            add_values", RAGGED, "race"),
    Bug("no barrier before the last values", decode, "attend", "rescale = barrier_any(changed)\n        first", "rescale = 1\n        first", LATER, "race"),
    Bug("weights are written where those of the tile before are read", decode, "attend", "other = int32(both - weights)", "other = weights", LATER, "race"),
    Bug("a tile is filled whose values are still to be added", decode, "attend", "filled = int32(AHEAD - 1)", "filled = int32(AHEAD)", LATER, "nan"),
    Bug("one tile too many is waited for at the end only", decode, "attend", "first_tile + i, end_tile, (entries", "first_tile + i, select(i > 0, end_tile, 0), (entries", LATER, "nan"),
    Bug("a share without keys adds a tile", decode, "attend", "select(first_tile < end_tile, common, int32(-TILE))", "common", NOTHING_LATER, "nan"),
    Bug("sums that must be rescaled are not", decode, "attend", "rescale = barrier_any(changed)\n            add_values", "rescale = barrier_any(0)\n            add_values", Case(lengths=(150,), heads=4, scores="peaked", out="float32"), "error"),
    Bug("no barrier between requests", decode, "decode", "barrier()  # the stages and the factors have been read", "pass", Case(lengths=(0, 0, 5), heads=4), "race", ONE_TEAM),
    Bug("no barrier before a factor is read", decode, "share_factor", "    barrier()", "    pass", RAGGED, "race"),
    Bug("the stage in use is filled", decode, "attend", "filled = int32(AHEAD - 1)", "filled = int32(-1)", RAGGED, "unfinished copy"),
    Bug("copies are not committed", decode, "start_tile", "cp_async_commit()", "pass", RAGGED, "unfinished copy"),
    Bug("the halves of B are swapped", attend, "partial_scores", "first = (r0, r1)", "first = (r1, r0)", RAGGED, "error"),
    Bug("the columns of B are swapped", attend, "partial_scores", "second = (r2, r3)", "second = (r0, r1)", RAGGED, "error"),
    Bug("a1 and a2 are exchanged", attend, "partial_scores", "(words[w], words[w + 1], words[w + 2]", "(words[w], words[w + 2], words[w + 1]", RAGGED, "error"),
    Bug("rows g and g + 8 are exchanged", attend, "partial_scores", "* 8 + half * 2", "* 8 + (1 - half) * 2", RAGGED, "error"),
    Bug("ldmatrix at 8 bytes", attend, "find_places", "((lane >> 3) & 1) * 16", "((lane >> 3) & 1) * 8", RAGGED, "alignment"),
    Bug("a row's chunks are looked for in their first order", attend, "add_values", "^ flip_of_token(token)", "^ 0", RAGGED, "error"),
    Bug("a row's chunks are copied in their first order", memory, "load_tile", "(part ^ flip)", "part", RAGGED, "error"),
    Bug("the steps of a score take the chunks in their first order", attend, "find_places", "^ (flip_of_token(token) * 16)", "^ 0", RAGGED, "error"),
    Bug("a warp is dealt another warp's values", attend, "add_values", "(thread >> 5) * VALUE_BYTES", "(thread >> 6) * VALUE_BYTES", RAGGED, "error"),
    Bug("sums are not rescaled", attend, "add_values", "sums[s] = sums[s] * upper", "sums[s] = sums[s]", Case(lengths=(150,), heads=4, scores="peaked", out="float32"), "error"),
    Bug("the sum of weights is not rescaled", attend, "softmax", "total = total * decay", "total = total", Case(lengths=(150,), heads=4, scores="peaked", out="float32"), "error"),
    Bug("a row's maximum misses half of its lanes", attend, "softmax", "range(ROW_LANE_BITS)", "range(ROW_LANE_BITS - 1)", RAGGED, "error"),
    Bug("one key too many", attend, "softmax", "< seen, z", "<= seen, z", TWO_TOKENS, "error"),
    Bug("holes count", attend, "softmax", "z = select(bias[i] == float32(0.0), z, bias[i])", "z = z", SPARSE, "error"),
    Bug("the parts of a score are looked for elsewhere", attend, "whole_scores", "flip_of(row)", "flip_of(row + 1)", RAGGED, "error"),
    Bug("a part of a score is forgotten", attend, "whole_scores", "range(1, DIM_GROUPS)", "range(2, DIM_GROUPS)", RAGGED, "error"),
    Bug("a warp takes the other half of the queries", attend, "find_places", "smem + QUERIES_AT + (first_row + (lane & 15))", "smem + QUERIES_AT + (lane & 15)", HALVES, "error", ON_HOPPER),
    Bug("a warp stores queries in the other half", memory, "load_queries", "smem + QUERIES_AT + (first_row + m * 16 + g)", "smem + QUERIES_AT + (m * 16 + g)", HALVES, "race", ON_HOPPER),
    Bug("a key of later tokens is multiplied by 0", attend, "add_values", "select(int32(token) < in_common, values, smem + ZEROS_AT)", "values", MANY_TOKENS, "error"),
    Bug("keys of later tokens are left out", attend, "add_late_values", "smaller_int(until, first + TILE)", "larger_int(common, first)", MANY_TOKENS, "error"),
    Bug("even and odd dims are mixed", attend, "add_values", "permute(r0, r0, 0x3120)", "permute(r0, r0, 0x3210)", E4M3, "error"),
    Bug("dims of a chunk come in another order", memory, "load_queries", "low = query_word(place, ok)\n                    high = query_word(place + 4, ok)", "high = query_word(place, ok)\n                    low = query_word(place + 4, ok)", ON_E4M3, "error"),
    Bug("rows past the last head are read", memory, "load_queries", "ok = row < rows", "ok = 1", Case(lengths=(20,), heads=3), "bounds"),
    Bug("a prefetch past the last head", memory, "prefetch_queries", "(row < rows) &", "(row < rows + 1) &", Case(lengths=(20,), heads=3), "bounds"),
    Bug("a prefetch past the table", memory, "prefetch_table", "(at < int64(columns - 1) * step + 4)", "1", Case(lengths=(20,), heads=3), "bounds"),
    Bug("slots past the pool are read", memory, "place_of", "(low >= 0) & (low < entries) & (high == 0)", "low >= 0", Case(lengths=(70,), heads=4, top_k=40, slots="past"), "bounds"),
    Bug("an address in 32 bits", memory, "place_of", "int64(page) * page_step", "int32(page * page_step)", FAR, "bounds"),
    Bug("16-byte copies of rows that are not aligned", memory, "copy16_by_number", "words = (word_of(source, ok), word_of(source + 4, ok)", "words = (word_of(source, ok), word_of(source + 8, ok)", OFFSET, "error"),
    Bug("a branch that differs from thread to thread", memory, "load_tile", "    for i in range(LOADS):", "    if token < 20:\n        stage = stage\n    for i in range(LOADS):", RAGGED, "divergence"),
    Bug("row tiles share a part", decode, "leave_part", "* tiles + tile) * ROWS", "* tiles) * ROWS", WIDE, "two blocks"),
    Bug("an output goes into an input", decode, "decode", "(out + owner * out_request", "(query + owner * out_request", Case(lengths=(5,), heads=4), "read-only"),
    Bug("a sink for each part", decode, "leave_part", "store_f32(part_lse + mine * 4, top + log2(total)", "store_f32(part_lse + mine * 4, top + log2(total + float32(1.0))", SINKS, "error"),
    Bug("a part too many is merged", merge, "merge", "- head_team + 1", "- head_team + 2", RAGGED, "bounds"),
    Bug("heads and later parts are confused", merge, "row_of", "select(i == 0, of_head, int64(0))", "select(i == 0, int64(0), of_head)", RAGGED, "nan"),
    Bug("teams are rounded up", schedule, "team_of", "quotient(unit, share)", "quotient(unit + share - 1, share)", Case(lengths=(128, 128), heads=4), "bounds"),
    Bug("a page is taken for the one before", memory, "page_of", "index << 1, factor", "(index << 1) - 1, factor", RAGGED, "bounds"),
    Bug("a group's sum is forgotten", merge, "add_groups", "done = int32(0)", "done = int32(AT_ONCE)", Case(lengths=(640,), heads=4), "error"),
)  # fmt: skip


def planted(bug: Bug) -> dict[str, Any]:
    """The function with the bug in it, by name."""
    source = inspect.getsource(getattr(bug.module, bug.function))
    assert bug.old in source, "the kernel has changed: give the bug its new place"
    namespace = dict(vars(bug.module))
    exec(compile(source.replace(bug.old, bug.new, 1), f"<{bug.name}>", "exec"), namespace)
    function = namespace[bug.function]
    assert isinstance(function, FunctionType)
    return {bug.function: function}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(emulate, bug):
    with pytest.raises((EmulatorError, Mismatch)) as caught:
        emulate(bug.case, instead=planted(bug), **dict(bug.options))
    assert caught.value.kind == bug.found


LEAKS = (
    Bug("a key of later tokens is multiplied by 0", attend, "add_values", "int32(token) < in_common", "int32(token) < in_common + 3", MANY_TOKENS, "nan"),
    Bug("the tile before the first is read", decode, "attend", "select(at == first_tile, int32(-TILE), common)", "common", TOKENS_LATER, "nan"),
    Bug("a key of later tokens is added with weight 0", attend, "add_late_values", "select(seen, sums[s] + weight * x, sums[s])", "sums[s] + weight * x", MANY_TOKENS, "nan"),
)  # fmt: skip


@pytest.mark.parametrize("bug", LEAKS, ids=lambda bug: bug.name)
def test_a_nan_that_leaks_into_earlier_tokens_is_found(emulated_call, bug):
    with pytest.raises(Mismatch) as caught:
        judges.visible_nan_stays_in_its_rows(emulated_call(instead=planted(bug)), bug.case, "cpu")
    assert caught.value.kind == bug.found


def test_without_a_bug_no_nan_leaks(emulated_call):
    judges.visible_nan_stays_in_its_rows(emulated_call(), MANY_TOKENS, "cpu")


@pytest.mark.parametrize("case", sorted({bug.case for bug in BUGS}, key=repr), ids=repr)
def test_without_a_bug_each_of_these_cases_is_right(emulate, case):
    emulate(case)
