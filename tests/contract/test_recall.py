"""A call like one that was checked before is not checked again, and nothing that the checks would find gets past it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla
from mla import dispatch, recall, registry
from mla.testing import Case, build
from mla.testing.case import CHOICES

CALL = mla.trtllm_batch_decode_with_kv_cache_mla


class Remembered:
    """A backend that computes what the reference computes, is remembered, and keeps what it was given."""

    name = "remembered"

    def __init__(self) -> None:
        self.asked = 0
        self.bound = 0
        self.problems: list[mla.Problem] = []  # one for each call, remembered or not

    def why_not(self, problem: mla.Problem) -> list[str]:
        self.asked += 1
        return []

    def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self.problems.append(problem)
        registry.load("reference").run(problem, out, lse)

    def bind(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Callable[..., None]:
        self.bound += 1

        def run(query: Any, cache: Any, tables: Any, lens: Any, out: Any, lse: Any, sinks: Any, scale1: Any, scale2: Any, workspace: Any, bound: Any) -> None:  # fmt: skip
            given = dict(query=query, kv_cache=cache, block_tables=tables, seq_lens=lens, sinks=sinks, out=out, lse=lse)
            given |= dict(bmm1_scale=scale1, bmm2_scale=scale2, workspace=workspace, max_seq_len=bound)
            self.run(dataclasses.replace(problem, **given), out, lse)

        return run


class Forgotten(Remembered):
    """The same without a `bind`."""

    name = "forgotten"
    bind = property()  # type: ignore[assignment]  # looking it up is an AttributeError


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    mla.backends()
    copies = {name: dataclasses.replace(entry) for name, entry in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", copies)
    monkeypatch.setattr(recall, "_seen", {})


@pytest.fixture
def kernel() -> Remembered:
    made = Remembered()
    mla.register_backend("remembered", made)
    return made


PLAIN = Case(lengths=(9, 20), heads=2, page_size=4, out="bfloat16", lse="flat")


def run(case: Case, **changes: Any) -> Any:
    return CALL(**build(case).arguments | changes, backend="remembered")


@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        Case(lengths=(9, 20), q_len=2, heads=2, lse="none"),
        Case(lengths=(9, 20), heads=2, top_k=6, slots="holes", sinks="normal", lse="rows", out="float32"),
        Case(lengths=(9, 20), heads=2, cache_rank=4, out="float16", out_rank=3, lse="transposed"),
        Case(lengths=(9, 20), heads=2, scale_form="tensor", lse_base="basee", out="bfloat16", out_layout="transposed"),
        Case(lengths=(9, 20), heads=2, scale_form="tensor4d", workspace="noise", query_layout="spread"),
    ],
    ids=repr,
)
def test_a_kind_that_was_checked_is_found_again_and_means_the_same(kernel, case):
    run(case)
    other = dataclasses.replace(case, lengths=(3, 17), seed=5, bmm1=0.3, bmm2=2.0, max_slack=77)
    call = build(other)
    if other.top_k == 0:  # a table of the same shape, whatever the lengths are
        tables = build(case).arguments["block_tables"].clone()
        tables[:, : call.arguments["block_tables"].shape[1]] = call.arguments["block_tables"]
        call.arguments["block_tables"] = tables
    pages = build(case).arguments["kv_cache"].shape[0]
    cache = call.arguments["kv_cache"]
    call.arguments["kv_cache"] = torch.cat([cache, cache[:1].expand(pages - len(cache), *cache.shape[1:])])
    expected = CALL(**build(other).arguments, backend="reference")
    result = CALL(**call.arguments, backend="remembered")
    assert (kernel.asked, kernel.bound, len(kernel.problems)) == (1, 1, 2)
    for got, right in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (result, expected)), strict=True):
        assert torch.equal(got, right)


def test_a_remembered_call_gives_the_problem_that_the_checks_would_give(kernel):
    case = Case(lengths=(9, 20), q_len=2, heads=2, sinks="normal", cache_rank=4, out="float32", lse="flat", workspace="ones", scale_form="tensor4d")  # fmt: skip
    for _ in range(2):
        run(case)
    checked, recalled = kernel.problems
    assert kernel.asked == 1
    for field in dataclasses.fields(mla.Problem):
        one, other = getattr(checked, field.name), getattr(recalled, field.name)
        if not isinstance(one, torch.Tensor):
            assert one == other, field.name
            continue
        assert (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, other.device), field.name  # fmt: skip
        if field.name not in ("out", "lse"):
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), field.name


STATIC = {
    "q_len": 3, "heads": 3, "page_size": 8, "query": "float8_e4m3fn", "cache": "float8_e4m3fn", "out": "float32", "top_k": 5, "sinks": "normal",
    "scale_form": "tensor", "spare_pages": 3, "table_slack": 3, "query_layout": "wider", "cache_layout": "wider", "table_layout": "sliced",
    "out_layout": "sliced", "cache_rank": 4, "out_rank": 3, "tables": "int64", "lens": "int64", "lse": "rows", "lse_base": "basee",
    "workspace": "zeros", "lengths": (9, 20, 3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), STATIC.items(), ids=STATIC)
def test_another_shape_stride_dtype_or_option_is_checked_anew(kernel, name, value):
    run(PLAIN)
    others = {"cache": value} if name == "query" else {}  # the contract has no e4m3 query without an e4m3 cache
    run(dataclasses.replace(PLAIN, **{name: value} | others))
    assert kernel.asked == 2
    run(PLAIN)
    assert kernel.asked == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"enable_pdl": None}, {"enable_pdl": True}),
        ({"enable_pdl": True}, {"enable_pdl": False}),
        ({"deterministic": False}, {"deterministic": True}),
        ({"return_lse": True}, {"return_lse": False}),
        ({"return_lse_base": None}, {"return_lse_base": "basee"}),
        ({"out": None}, {}),
        ({"lse": None}, {}),
        ({"bmm1_scale": 0.5}, {"bmm1_scale": torch.tensor(0.5)}),
        ({"bmm2_scale": 0.5}, {"bmm2_scale": torch.tensor([0.5])}),
        ({"workspace_buffer": None}, {"workspace_buffer": torch.zeros(3)}),
        ({"sinks": None}, {"sinks": torch.zeros(2)}),
    ],
    ids=str,
)
def test_options_that_differ_are_kinds_that_differ(kernel, first, second):
    for expected, changes in ((1, first), (2, second), (2, first), (2, second)):
        run(PLAIN, **changes)
        assert kernel.asked == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": [torch.ones(2)]},
        {"sinks": torch.ones(2, dtype=torch.bfloat16)},
        {"bmm1_scale": 1},
        {"query": torch.nn.Parameter(torch.ones(2, 1, 2, 576).bfloat16(), requires_grad=False)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_quick_way_does_not_describe_is_checked_each_time(kernel, changes):
    for _ in range(3):
        run(PLAIN, **changes)
    assert kernel.asked == 3


# Whatever the first call would refuse, a later one refuses, too.


def refused(kind: type[Exception], text: str, changes: Callable[[dict[str, Any]], dict[str, Any]], case: Case = PLAIN):
    """The same error before and after a legal call of that kind, with every input and output untouched."""
    for legal_first in (False, True):
        call = build(case)
        if legal_first:
            CALL(**call.arguments, backend="remembered")
        wrong = call.arguments | changes(call.arguments)
        before = {n: v.clone().view(torch.uint8) for n, v in wrong.items() if isinstance(v, torch.Tensor) and v.ndim}
        with pytest.raises(kind, match=text) as caught:
            CALL(**wrong, backend="remembered")
        assert type(caught.value) is kind
        assert all(torch.equal(wrong[name].view(torch.uint8), bits) for name, bits in before.items())


def test_a_negative_bound_is_refused_after_a_legal_call(kernel):
    refused(ValueError, "max_seq_len is -1; expected an int >= 0", lambda a: {"max_seq_len": -1})
    refused(TypeError, "max_seq_len is a bool; expected an int", lambda a: {"max_seq_len": True})
    refused(TypeError, "max_seq_len is a float; expected an int", lambda a: {"max_seq_len": 20.0})


@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39])
def test_a_scale_that_is_not_finite_is_refused_after_a_legal_call(kernel, name, value):
    refused(ValueError, f"{name} is .*; expected a number that is finite in float32", lambda a: {name: value})


def test_a_float_that_counts_as_an_int_is_refused_after_a_legal_call(kernel):
    refused(TypeError, "kv_lora_rank is a float; expected an int", lambda a: {"kv_lora_rank": 512.0})
    refused(TypeError, "sparse_mla_top_k is a bool; expected an int", lambda a: {"sparse_mla_top_k": False})
    refused(TypeError, "return_lse is a int; expected a bool", lambda a: {"return_lse": 1})
    refused(TypeError, "deterministic is a int; expected a bool", lambda a: {"deterministic": 0})


SQUARE = Case(lengths=(9, 20), heads=576, page_size=4, spare_pages=600, out="bfloat16")


@pytest.mark.parametrize("name", ["query", "kv_cache"])
def test_an_out_that_lies_in_an_input_is_refused_after_a_legal_call(kernel, name):
    def inside(arguments: dict[str, Any]) -> dict[str, Any]:
        rows = arguments[name].view(-1)
        return {"out": rows[: arguments["out"].numel()].view_as(arguments["out"])}

    refused(ValueError, f"out shares memory with {name}", inside, SQUARE)


def test_an_lse_that_lies_in_sinks_a_scale_or_out_is_refused_after_a_legal_call(kernel):
    case = Case(lengths=(9,), heads=4, sinks="normal", scale_form="tensor", out="float32", lse="rows")

    def lse_in(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def inside(arguments: dict[str, Any]) -> dict[str, Any]:
            buffer = torch.ones(8)
            if name == "out":
                return {"lse": arguments["out"].view(-1).as_strided((1, 1, 4), arguments["lse"].stride())}
            like = arguments[name]
            held = buffer.as_strided(like.shape, like.stride(), 2)
            return {"lse": buffer[:4].as_strided((1, 1, 4), arguments["lse"].stride()), name: held}

        return inside

    for name in ("sinks", "bmm1_scale", "bmm2_scale"):
        refused(ValueError, f"lse shares memory with {name}", lse_in(name), case)
    refused(ValueError, "out shares memory with lse", lse_in("out"), case)


def test_outputs_interleaved_with_inputs_stay_legal_and_right(kernel):
    expected = CALL(**build(PLAIN).arguments, backend="reference")
    for _ in range(3):
        call = build(PLAIN)
        buffer = torch.zeros(2, 1, 2, 576 + 512, dtype=torch.bfloat16)
        buffer[..., :576] = call.arguments["query"]
        shared = {"query": buffer[..., :576], "out": buffer[..., 576:]}
        out, lse = CALL(**call.arguments | shared, backend="remembered")
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_strict_mode_checks_every_call_whether_it_is_remembered_or_not(kernel):
    run(PLAIN)
    call = build(PLAIN)
    call.arguments["seq_lens"].fill_(1000)
    with mla.strict(), pytest.raises(ValueError, match=r"seq_lens\[0\] is 1000"):
        CALL(**call.arguments, backend="remembered")
    assert len(kernel.problems) == 1


# Who is remembered, and for how long.


def test_a_backend_that_binds_nothing_is_never_remembered():
    plain = Forgotten()
    mla.register_backend("forgotten", plain)
    for _ in range(3):
        CALL(**build(PLAIN).arguments, backend="forgotten")
    assert (plain.asked, len(plain.problems)) == (3, 3)
    assert recall._seen == {}


def test_the_reference_is_asked_each_time(monkeypatch):
    CALL(**build(PLAIN).arguments)
    assert recall._seen == {}


def test_a_call_of_no_rows_is_not_remembered(kernel):
    for _ in range(2):
        assert run(dataclasses.replace(PLAIN, lengths=()))[0].shape == (0, 1, 2, 512)
    assert (kernel.asked, kernel.bound, kernel.problems) == (2, 0, [])


def test_a_warm_up_leaves_the_first_call_to_be_checked(kernel):
    mla.warmup(**build(PLAIN).arguments, backend="remembered")
    run(PLAIN)
    run(PLAIN)
    assert (kernel.asked, len(kernel.problems)) == (2, 2)


def test_registering_a_backend_forgets(kernel):
    run(PLAIN)

    class Other(Remembered):
        name = "other"

    mla.register_backend("other", Other())
    run(PLAIN)
    assert kernel.asked == 2
    replacement = Remembered()
    mla.register_backend("remembered", replacement, replace=True)
    run(PLAIN)
    assert (kernel.asked, replacement.asked, len(replacement.problems)) == (2, 1, 1)


def test_too_many_kinds_are_all_forgotten(kernel, monkeypatch):
    monkeypatch.setattr(recall, "MOST", 3)
    for batch in (1, 2, 3):
        run(dataclasses.replace(PLAIN, lengths=(4,) * batch))
    assert (kernel.asked, len(recall._seen)) == (3, 3)
    run(dataclasses.replace(PLAIN, lengths=(4,) * 4))
    assert (kernel.asked, len(recall._seen)) == (4, 1)
    run(dataclasses.replace(PLAIN, lengths=(4,)))
    assert kernel.asked == 5


def test_what_is_remembered_holds_no_tensor_of_the_call(kernel):
    run(Case(lengths=(9,), heads=2, sinks="normal", scale_form="tensor", workspace="ones", out="bfloat16", lse="flat"))
    ((kind, seen),) = recall._seen.items()
    assert not any(isinstance(part, torch.Tensor) for part in (*kind, *vars(seen).values()))


def test_auto_remembers_only_what_depends_on_the_kind_for_all_that_it_asks(kernel, monkeypatch):
    """One that is asked before and looks at max_seq_len may accept the next call of the kind."""

    class Moody(Forgotten):
        name = "moody"

        def why_not(self, problem: mla.Problem) -> list[str]:
            return ["the bound is too large"] if problem.max_seq_len > 100 else []

    moody = Moody()
    mla.register_backend("moody", moody)
    monkeypatch.setattr(dispatch, "_ANYTHING_ELSE", ("moody", "remembered", "reference"))
    for bound in (1000, 50, 1000):
        CALL(**build(PLAIN).arguments | {"max_seq_len": bound})
    assert (len(moody.problems), len(kernel.problems), kernel.asked) == (1, 2, 2)
    monkeypatch.setattr(dispatch, "_ANYTHING_ELSE", ("remembered", "reference"))
    for _ in range(3):
        CALL(**build(PLAIN).arguments)
    assert (len(kernel.problems), kernel.asked, kernel.bound) == (5, 3, 1)


def test_every_field_of_a_case_that_is_static_is_tried_here():
    dynamic = {"slots", "scores", "values", "unread", "tail"}
    assert set(CHOICES) - dynamic <= set(STATIC)
