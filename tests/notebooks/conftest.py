"""The notebooks' folder and the modules in it; and the notebooks' runs lie apart, so that workers share them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"


def module_of(name: str) -> ModuleType:
    """A module of the notebooks' folder, which is not a package."""
    known = f"notebooks_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


@pytest.fixture(scope="session")
def folder() -> Path:
    return FOLDER


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    return module_of


@pytest.fixture(scope="session")
def exercises() -> ModuleType:
    return module_of("exercises")


@pytest.fixture(scope="session")
def pairing() -> ModuleType:
    return module_of("pairing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the runs of whole notebooks evenly among the other tests, between files and never inside one.

    xdist deals tests out in long pieces of the list: side by side, all runs would go to one worker.
    """
    runs = [item for item in items if item.path.name == "test_runs.py" and item.path.parent == Path(__file__).parent]
    others = [item for item in items if item not in runs]
    if not runs or not others:
        return
    files = [list(group) for _, group in groupby(others, key=lambda item: item.path)]
    dealt: list[pytest.Item] = []
    placed, seen = 0, 0
    for file in files:
        while placed < len(runs) and placed * len(others) <= seen * len(runs):
            dealt.append(runs[placed])
            placed += 1
        dealt += file
        seen += len(file)
    items[:] = [*dealt, *runs[placed:]]
