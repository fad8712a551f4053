"""The judge: what it accepts, what it refuses, in which order, and what it says."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import mla
from mla.reference import decode
from mla.testing import Case, Mismatch, assert_close, budget, build, cosine, signal_to_noise

CALL = build(Case(lengths=(9, 0, 33), q_len=2, heads=3, sinks="none"))
EXACT = decode(CALL.problem)
ALLOWED = budget(CALL.problem, *EXACT)


def right() -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = CALL.run(mla.trtllm_batch_decode_with_kv_cache_mla)
    assert lse is not None
    return out.clone(), lse.clone()


def refused(actual: object) -> Mismatch:
    with pytest.raises(Mismatch) as caught:
        assert_close(actual, CALL.problem, exact=EXACT, allowed=ALLOWED)
    return caught.value


def test_the_right_answer_passes_and_nothing_is_returned():
    out, lse = right()
    assert assert_close((out, lse), CALL.problem) is None
    assert assert_close((out, lse.view(3, 2, 3)), CALL.problem) is None
    assert assert_close(out, CALL.problem) is None


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        (lambda out, lse: (None, lse), "type", "out"),
        (lambda out, lse: (out, 3.0), "type", "lse"),
        (lambda out, lse: (out[:, :1], lse), "shape", "out"),
        (lambda out, lse: (out, lse.T.contiguous()), "shape", "lse"),
        (lambda out, lse: (out.float(), lse), "dtype", "out"),
        (lambda out, lse: (out, lse.double()), "dtype", "lse"),
        (lambda out, lse: (out.to("meta"), lse), "device", "out"),
    ],
)
def test_kind_shape_dtype_and_device_are_judged_before_numbers(change, kind, what):
    mismatch = refused(change(*right()))
    assert (mismatch.kind, mismatch.what) == (kind, what)
    assert "expected" in str(mismatch)


def test_a_nan_is_named_before_any_error():
    out, lse = right()
    out[2, 1, 2, 511] = math.nan
    out[0, 0, 0, 0] = 1e3
    mismatch = refused((out, lse))
    assert (mismatch.kind, mismatch.where) == ("nan", (2, 1, 2, 511))
    assert "request 2, token 1, head 2, dim 511" in str(mismatch)


@pytest.mark.parametrize("sinks", ["none", "normal"])
@pytest.mark.parametrize("minus", [(0, 2), (0, 1, 2, 3)], ids=["some", "all"])
def test_rows_with_scores_of_minus_infinity_are_judged_like_others(sinks, minus):
    call = build(Case(lengths=(4,), heads=2, page_size=4, sinks=sinks, query="float32", cache="float32"))
    page = call.arguments["block_tables"][0, 0]
    call.arguments["kv_cache"][page, list(minus), -1] = -math.inf
    call.arguments["query"][..., -1] = 1.0
    out, lse = decode(call.problem)
    assert lse.isneginf().all() == (len(minus) == 4 and sinks == "none")
    good = (out.to(call.problem.out_dtype), lse.to(torch.float32))
    assert_close(good, call.problem)
    limit = budget(call.problem, out, lse)
    assert limit.lse[lse.isfinite()].isfinite().all()
    with pytest.raises(Mismatch, match="lse: "):
        assert_close((good[0], torch.where(lse.isinf(), 0.0, lse + 1.0).to(torch.float32)), call.problem)
    if not out.isnan().any():
        assert limit.out.isfinite().all()
        with pytest.raises(Mismatch, match="out: errors exceed the budget"):
            assert_close(((out + 0.1).to(good[0].dtype), good[1]), call.problem)


def test_a_missing_nan_is_as_wrong_as_a_nan():
    cache = CALL.problem.kv_cache.clone()
    cache[CALL.arguments["block_tables"][0, 0], 0] = math.nan
    sick = dataclasses.replace(CALL.problem, kv_cache=cache)
    out, lse = right()
    with pytest.raises(Mismatch, match="NaN is misplaced"):
        assert_close((out, lse), sick)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinity_out_of_place_is_named(value):
    out, lse = right()
    out[0, 1, 2, 3] = value
    assert refused((out, lse)).kind == "inf"


def test_an_lse_of_an_empty_row_must_be_minus_infinity():
    for wrong in (0.0, -1e30, math.inf):
        out, lse = right()
        lse[2, 0] = wrong
        assert refused((out, lse)).what == "lse"


def test_an_empty_row_must_be_exactly_zero():
    out, lse = right()
    out[1, 0, 0, 7] = 1e-30
    mismatch = refused((out, lse))
    assert (mismatch.kind, mismatch.where) == ("error", (1, 0, 0, 7))


def test_the_message_has_place_values_budget_count_share_and_information():
    out, lse = right()
    out[2, 0, 1, 5] += 1.0
    out[0, 0, 0, 0] += 0.5
    text = str(refused((out, lse)))
    assert "errors exceed the budget in 2 of 9216 elements (0.02%)" in text
    assert (
        "worst at request 2, token 0, head 1, dim 5: got " in text
        or "worst at request 0, token 0, head 0, dim 0" in text
    )
    assert "budget" in text
    assert "signal to noise" in text
    assert "cosine" in text


def test_one_element_a_little_beyond_its_budget_is_refused_and_within_it_is_not():
    out, lse = EXACT[0].to(torch.float32), EXACT[1].to(torch.float32).view(6, 3)
    wide = dataclasses.replace(CALL.problem, out_dtype=torch.float32)
    allowed = budget(wide, *EXACT)
    for factor, passes in ((0.9, True), (1.1, False)):
        moved = out.clone()
        moved[2, 1, 0, 4] += factor * allowed.out[2, 1, 0, 4]
        moved_lse = lse.clone()
        moved_lse[4, 2] += factor * allowed.lse[2, 0, 2]
        for actual in (moved, (out, moved_lse)):
            if passes:
                assert_close(actual, wide, exact=EXACT, allowed=allowed)
            else:
                with pytest.raises(Mismatch, match="errors exceed the budget in 1 of"):
                    assert_close(actual, wide, exact=EXACT, allowed=allowed)


def test_no_environment_variable_loosens_it(monkeypatch):
    for name in ("CI", "MLA_STRICT", "MLA_TOLERANCE", "PYTEST_CURRENT_TEST"):
        monkeypatch.setenv(name, "1")
    out, lse = right()
    out[2, 0, 1, 5] += 1.0
    assert refused((out, lse)).kind == "error"


def test_an_overflow_of_the_output_format_is_right_where_the_exact_answer_overflows():
    call = build(Case(lengths=(5,), heads=2, values="ones", bmm2=3e5, out="float16"))
    out, lse = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)
    assert out.isinf().all()
    assert_close((out, lse), call.problem)
    with pytest.raises(Mismatch):
        assert_close((torch.full_like(out, 7.0), lse), call.problem)


def test_signal_to_noise_and_cosine_are_what_they_are_called():
    exact = torch.tensor([3.0, 4.0, math.nan])
    assert signal_to_noise(exact, exact) == math.inf
    assert signal_to_noise(torch.tensor([3.0, 4.5, 0.0]), exact) == pytest.approx(20.0)
    assert signal_to_noise(torch.ones(2), torch.zeros(2)) == -math.inf
    assert cosine(torch.tensor([6.0, 8.0, 1.0]), exact) == pytest.approx(1.0)
    assert math.isnan(cosine(torch.zeros(3), exact))


def test_the_budget_grows_with_what_formats_lose_and_with_nothing_else():
    def largest(**changes: object) -> float:
        call = build(Case(lengths=(60,), heads=3, **changes))
        return float(budget(call.problem, *decode(call.problem)).out.max())

    assert largest(cache="float16", query="float16") < largest() < largest(cache="float8_e4m3fn")
    assert largest(cache="float32", query="float32") < largest(cache="float16", query="float16")
    assert largest(out="float32") < largest()
    assert largest(bmm2=2.0) == pytest.approx(2 * largest(), rel=1e-6)


DROWNED = Case(lengths=(0, 0, 0, 2, 0), q_len=2, heads=4, page_size=2, top_k=2, sinks="large", scores="peaked", values="request", bmm1=0.1352, tail="zero", spare_pages=2, table_slack=0, lse="none")  # fmt: skip


def test_weights_that_fp32_flushes_to_zero_under_a_large_sink_are_right():
    call = build(DROWNED)
    exact = decode(call.problem)
    weights = exact[0][3, 1, 0, 0] / 4.0  # of both keys together; every value is 4
    assert 2.0**-126 < weights < 2 * 2.0**-126
    out, _ = call.run(mla.trtllm_batch_decode_with_kv_cache_mla)
    assert out[3, 1, 0, 0] == 0.0
    assert_close(out, call.problem)
    assert_close(exact[0].bfloat16(), call.problem)


def test_flushing_excuses_what_fp32_cannot_hold_and_nothing_larger():
    call = build(DROWNED)
    exact = decode(call.problem)
    out = exact[0].bfloat16()
    out[3, 1, 0, 0] = 2.0**-122  # two keys of value 4 excuse 2 * (4 + 4) + 2 times 2^-126, the output one more
    assert_close(out, call.problem)
    out[3, 1, 0, 0] = 2.0**-121
    with pytest.raises(Mismatch, match="errors exceed the budget in 1 of"):
        assert_close(out, call.problem)


@pytest.mark.parametrize("bmm2", [0.0, 1.0])
def test_flushing_excuses_nothing_where_the_exact_answer_cannot_be_flushed(bmm2):
    """Values that are all 0, and a scale of 0, give 0 whatever becomes of the weights."""
    call = build(Case(lengths=(9,), heads=2, values="ones", scores="normal", bmm2=bmm2, unread="zero"))
    if bmm2:
        call.arguments["kv_cache"].zero_()
    allowed = budget(call.problem, *decode(call.problem))
    assert (allowed.out == 0).all()
