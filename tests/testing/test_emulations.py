"""No false alarm: whatever honest kernels round, the judge accepts; and it is not blind either."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mla.reference import decode
from mla.testing import assert_close, budget, build, honest
from mla.testing.profile import PUBLIC_PAIRS
from mla.testing.strategies import cases

PROBLEMS = 2000


@pytest.fixture(scope="module")
def ratios() -> dict[str, list[float]]:
    """Emulation -> the largest error / budget of each problem; the judge has accepted every one of them."""
    found: dict[str, list[float]] = defaultdict(list)

    @settings(
        max_examples=PROBLEMS, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(pairs=PUBLIC_PAIRS, max_batch=3, max_q_len=4, max_heads=20))
    def judge(case):
        call = build(case)
        problem = call.problem
        exact = decode(problem)
        allowed = budget(problem, *exact)
        for name, kernel in honest(case.cache).items():
            out, lse = call.run(kernel)
            assert_close(out if lse is None else (out, lse), problem, exact=exact, allowed=allowed)
            some = allowed.out > 0
            error = (out.reshape(exact[0].shape).double() - exact[0]).abs()
            if some.any():
                found[f"{case.cache} cache, {name}"].append(float((error[some] / allowed.out[some]).max()))

    judge()
    return found


def test_two_thousand_problems_and_every_honest_emulation_pass(ratios):
    assert len(ratios) == 15
    with_a_key = sum(len(values) for name, values in ratios.items() if name.endswith("cache, fp32 weights"))
    assert with_a_key > 0.6 * PROBLEMS  # in the rest every row is empty, and had to be exactly the identity


def test_the_budget_is_tight_enough_to_see(ratios, capsys):
    with capsys.disabled():
        print("\nerror / budget                                    median    max")
        for name, values in sorted(ratios.items()):
            print(f"{name:48} {torch.tensor(values).median():8.3f} {max(values):6.3f}")
    for name, values in ratios.items():
        assert 0.05 <= max(values) <= 1.0, name
