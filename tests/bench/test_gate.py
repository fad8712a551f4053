"""Wrong outputs do not pass, whatever is wrong with them; honest ones do."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch

import mla
from mla.bench import gate
from mla.bench.cases import BenchCase
from mla.bench.inputs import Inputs, make

CPU = torch.device("cpu")

CASES = [
    BenchCase("dense", (70, 3, 130), heads=3),
    BenchCase("tokens", (70, 4, 65), heads=2, q_len=4, page_size=16),
    BenchCase("sparse", (70, 10, 40), heads=2, q_len=3, top_k=24),
    BenchCase("fp16", (70, 3), heads=2, dtype="fp16"),
    BenchCase("fp8", (70, 3), heads=2, dtype="fp8"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_right_and_its_float32_answer_agrees_with_the_formula(case: BenchCase) -> None:
    inputs = make(case, CPU)
    right = gate.answer(inputs)
    out = mla.trtllm_batch_decode_with_kv_cache_mla(**inputs.arguments(None), backend="reference")
    judgement = gate.judge(out, right, must_hold=True)
    assert judgement.verdict == "right"
    assert judgement.within_budget
    assert judgement.relative_error is not None
    assert judgement.relative_error < 2.0**-8  # one rounding to bf16
    assert judgement.error_over_budget is not None
    assert 0 < judgement.error_over_budget < 1
    for one in right.judged:  # float64, by the project's own reference, against the plain float32 formula
        assert torch.allclose(one.exact[0][0].float(), right.out[one.request], atol=2e-6)


def test_the_judged_requests_are_the_ends_the_extremes_and_some_between() -> None:
    lengths = (50, 60, 1, 70, 55, 56, 57, 99, 58, 59)
    assert gate.spread(lengths) == [0, 2, 3, 6, 7, 9]
    assert gate.spread((5,)) == [0]


def spoil_row(row: int, out: torch.Tensor) -> torch.Tensor:
    out[row] = out[(row + 1) % len(out)]
    return out


def one_element(out: torch.Tensor) -> torch.Tensor:
    out[0, 1, 2, 3] += 0.5
    return out


def nan_in_a_row(out: torch.Tensor) -> torch.Tensor:
    out[5, 1, 0, 7] = math.nan
    return out


WRONG = {
    "another request's row, where the judge looks": (partial(spoil_row, 0), "relative error of the worst request is"),
    "another request's row, where it does not": (partial(spoil_row, 3), "relative error of the worst request is"),
    "scaled": (lambda out: 1.2 * out, "relative error of the worst request is"),
    "nothing written": (lambda out: torch.full_like(out, math.nan), "is not finite"),
    "one NaN, where the judge does not look": (nan_in_a_row, "is not finite"),
    "one element": (one_element, "request 0 alone: out: errors exceed the budget"),
    "wrong shape": (lambda out: out[..., :511], r"the output is \[7, 2, 4, 511\]; expected \[7, 2, 4, 512\]"),
    "no tensor": (lambda out: out.tolist(), "the output is list"),
    "wrong dtype": (lambda out: out.float(), "out has dtype float32; expected bfloat16"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_backend_that_is_wrong_does_not_pass(how: str, right: gate.Answer) -> None:
    spoil, message = WRONG[how]
    judgement = gate.judge(spoil(right.out.to(torch.bfloat16)), right, must_hold=True)
    assert judgement.verdict == "wrong"
    assert not judgement.within_budget
    assert re.search(message, judgement.reason)


def test_the_rows_spoiled_above_lie_where_they_should(small: Inputs) -> None:
    assert gate.spread(small.case.lengths) == [0, 1, 2, 4, 6]


def test_others_may_miss_the_budget_by_a_little_and_are_marked(right: gate.Answer) -> None:
    out = 1.03 * right.out
    assert gate.judge(out.to(torch.bfloat16), right, must_hold=True).verdict == "wrong"
    judgement = gate.judge(out, right, must_hold=False)  # float32 is no matter to them
    assert judgement.verdict == "near"
    assert not judgement.within_budget
    assert "errors exceed the budget" in judgement.reason
    assert judgement.relative_error == pytest.approx(0.03, abs=2e-3)
    assert gate.judge(1.06 * right.out, right, must_hold=False).verdict == "wrong"


def test_an_output_without_the_axis_of_one_token_is_as_good() -> None:
    inputs = make(BenchCase("one", (9, 70), heads=2), CPU)
    right = gate.answer(inputs)
    assert gate.judge(right.out[:, 0].to(torch.bfloat16), right, must_hold=True).verdict == "right"
