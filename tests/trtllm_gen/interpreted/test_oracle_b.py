"""The interpreted kernels hold the whole contract: the properties that `test_oracle_a` leaves, and random problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mla import registry
from mla.testing import PROPERTIES, Profile, judge_property
from mla.testing.suite import random_problems

PROFILE = Profile.of(registry.load("trtllm-gen").capabilities)  # type: ignore[attr-defined]
FIRST = 1 + next(index for index, prop in enumerate(PROPERTIES) if prop.name == "heads")
PROBLEMS = 60


@pytest.mark.parametrize("prop", PROPERTIES[FIRST:], ids=lambda prop: prop.name)
def test_the_property_holds(prop: Any, decode: Callable[..., Any]) -> None:
    if prop.gpu_only:
        pytest.skip("needs a GPU")
    finding = judge_property(prop, decode, PROFILE, "cpu")
    assert finding.failure is None, finding.failure
    assert (finding.verdict, finding.skipped) == ("holds", 0)


def test_problems_drawn_at_random_are_right(decode: Callable[..., Any]) -> None:
    finding = random_problems(decode, PROFILE, "cpu", PROBLEMS)
    assert finding.failure is None, finding.failure
    assert finding.judged == PROBLEMS
