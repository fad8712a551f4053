"""`mla demo` passes on what was given, and nothing else."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from mla.cli import demo, main
from mla.demo import run as demo_run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `run_demo` was called with; it returns 7."""
    received: dict[str, Any] = {}

    def run_demo(**given: Any) -> int:
        received.update(given)
        return 7

    monkeypatch.setattr(demo_run, "run_demo", run_demo)
    return received


def test_the_demo_decides_the_exit_status_and_its_own_defaults(asked: dict[str, Any]) -> None:
    assert main(["demo"]) == 7
    assert asked == {}


def test_every_option_arrives(asked: dict[str, Any], tmp_path: Path) -> None:
    picture = str(tmp_path / "errors.png")
    words = ["--tokens", "20", "--steps", "2", "--seed", "5", "--device", "cpu", "--small", "--picture", picture]
    main(["demo", *words])
    assert asked == {"tokens": 20, "steps": 2, "seed": 5, "device": "cpu", "small": True, "picture": picture}


def test_no_picture_is_none(asked: dict[str, Any]) -> None:
    main(["demo", "--no-picture"])
    assert asked == {"picture": None}


def test_the_options_are_those_that_the_demo_has() -> None:
    assert set(demo.OPTIONS) == set(inspect.signature(demo_run.run_demo).parameters)


def test_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--small", "--no-picture", "--tokens", "4", "--steps", "1"]) == 0
    assert "DeepSeek-V3" in capfd.readouterr().out
