"""No false alarm: whatever honest kernels round, the judge accepts; and it is not blind either."""

from __future__ import annotations

import pytest

from mla.testing import Kernel, Mismatch, tightness


def test_a_short_survey_has_every_honest_way_and_a_line_of_the_table_for_each():
    found = tightness.survey(60)
    assert len(found) == 15
    assert len(tightness.table(found).splitlines()) == 1 + 15


@pytest.mark.no_cover
def test_two_thousand_problems_and_every_honest_way_pass_and_the_budget_is_tight_enough_to_see(capsys):
    """The judge raises if it refuses one; the largest share of the budget that each way uses shows what it can see."""
    assert tightness.PROBLEMS == 2000
    found = tightness.survey()
    with capsys.disabled():
        print("\n" + tightness.table(found))
    assert len(found) == 15
    with_a_key = sum(len(values) for name, values in found.items() if name.endswith("cache, fp32 weights"))
    assert with_a_key > tightness.PROBLEMS / 2  # in the rest every row is empty, and had to be exactly the identity
    for name, values in found.items():
        assert 0.05 <= max(values) <= 1.0, name


def test_a_way_that_is_not_honest_stops_the_survey(monkeypatch):
    class Wrong(Kernel):
        def bmm2(self, p):
            return 1.5 * super().bmm2(p)

    monkeypatch.setattr(tightness, "honest", lambda cache, splits: {"wrong": Wrong()})
    with pytest.raises(Mismatch, match="errors exceed the budget"):
        tightness.survey(20)
