"""The wheel passes the suite too: the sdist's tests run against it, with no source folder in reach."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

PARTS = ["contract/test_exact_oracles.py", "registry", "cli"]  # quick parts that touch all three folders


@pytest.fixture(scope="session")
def tests_alone(built: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist without its three folders of source code."""
    home = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(built.sdist, home)
    (unpacked,) = home.iterdir()
    for folder in ("mla", "reference", "backends"):
        shutil.rmtree(unpacked / folder)
    return unpacked


def test_the_wheel_passes(wheel_python: Path, tests_alone: Path, command: Any) -> None:
    parts = [f"tests/{part}" for part in PARTS]
    assert [part for part in parts if not (tests_alone / part).exists()] == []
    quick = ("-o", "pythonpath=", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov")
    told = command(wheel_python, "-m", "pytest", *quick, *parts, cwd=tests_alone, OMP_NUM_THREADS="1").stdout
    assert " passed" in told
