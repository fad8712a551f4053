"""The tests that `pytest --mla-kernel` runs: every named case of every property that the kernel claims."""

from __future__ import annotations

import pytest

from mla.testing.case import Case
from mla.testing.properties import PROPERTIES, Property
from mla.testing.target import load


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    function, profile = load(option("--mla-kernel"), option("--mla-backend"), option("--mla-profile"))
    metafunc.parametrize("function", [function], ids=[""])
    rows = []
    for prop in PROPERTIES:
        for case in prop.cases:
            adapted = profile.adapt(case, keep_sizes=prop.variable)
            needs_gpu = prop.gpu_only and option("--mla-device") == "cpu"
            marks = []
            if option("--mla-device") not in profile.devices:
                marks.append(pytest.mark.skip(reason=f"not claimed: {option('--mla-device')}"))
            elif needs_gpu:
                marks.append(pytest.mark.skip(reason="needs a GPU"))
            elif adapted is None:
                marks.append(pytest.mark.skip(reason=f"not claimed: {', '.join(profile.why_not(case))}"))
            rows.append(pytest.param(prop, adapted or case, marks=marks, id=f"{prop.name}: {adapted or case!r}"[:200]))
    metafunc.parametrize(("prop", "case"), rows)


def test_kernel(function: object, prop: Property, case: Case, request: pytest.FixtureRequest) -> None:
    assert callable(function)
    prop.judge(function, case, request.config.getoption("--mla-device"))
