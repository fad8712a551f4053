"""The interpreted kernels hold the whole contract, property by property. The first part; `test_oracle_b` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mla import registry
from mla.testing import PROPERTIES, Profile, judge_property

PROFILE = Profile.of(registry.load("trtllm-gen").capabilities)  # type: ignore[attr-defined]
LAST = next(index for index, prop in enumerate(PROPERTIES) if prop.name == "heads")  # half of the time, about


@pytest.mark.parametrize("prop", PROPERTIES[: LAST + 1], ids=lambda prop: prop.name)
def test_the_property_holds(prop: Any, decode: Callable[..., Any]) -> None:
    finding = judge_property(prop, decode, PROFILE, "cpu")
    assert finding.failure is None, finding.failure
    assert (finding.verdict, finding.skipped) == ("holds", 0)
