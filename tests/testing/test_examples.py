"""The adaptors in examples/ load without the packages they adapt, and take the arguments of the call."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import mla
from mla.testing import Case, Profile

FOLDER = Path(__file__).parents[2] / "examples"
ADAPTORS = sorted(FOLDER.glob("*.py"))
PARAMETERS = set(inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla).parameters)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", ADAPTORS, ids=lambda path: path.stem)
def test_an_adaptor_says_what_it_claims_and_takes_what_the_call_takes(path):
    module = load(path)
    assert isinstance(module.profile, Profile)
    assert module.profile.devices == ("cuda",)
    assert "pip install" in module.__doc__
    parameters = set(inspect.signature(module.decode).parameters)
    assert PARAMETERS - {"backend", "enable_pdl", "deterministic"} <= parameters <= PARAMETERS


@pytest.mark.parametrize("path", ADAPTORS, ids=lambda path: path.stem)
def test_an_adaptor_claims_something_and_not_everything(path):
    profile = load(path).profile
    plain = Case(tail="zero", table_slack=0, lse="none", heads=16)
    sparse = Case(top_k=8, tail="zero", table_slack=0, lse="none", heads=16)
    claimed = [profile.adapt(case) is not None for case in (plain, sparse)]
    assert any(claimed)
    assert profile.why_not(Case(lengths=(5,), top_k=4, sinks="normal", scale_form="tensor", cache_layout="layers"))


def test_every_adaptor_stands_in_the_readme_and_was_measured():
    readme = (FOLDER / "README.md").read_text()
    results = {path.stem for path in (FOLDER.parent / "benchmarks" / "results" / "oracle").glob("*.json")}
    for path in ADAPTORS:
        assert f"`{path.name}`" in readme
        assert path.stem in results
