"""Each notebook runs from a clean kernel, and shows what the committed one shows."""

from __future__ import annotations

import importlib.util
import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDED = ("jupytext", "nbclient", "nbformat", "ipykernel", "matplotlib")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
TOOLCHAINS = {"08": "triton"}
"""What a notebook needs besides; one that is not installed here skips its run."""


def kinds(cell: Any) -> list[str]:
    """What a cell shows: streams by name, pictures and values by type; a stream in several pieces is one.

    Noise on stderr may differ by machine.
    """
    shown = [
        output.get("name") or "/".join(sorted(output.get("data", {"error": 0}))) for output in cell.get("outputs", [])
    ]
    return [kind for kind, _ in groupby(kind for kind in shown if kind != "stderr")]


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")


def printed(cell: Any) -> str:
    """What the cell's code prints, in one piece."""
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")


def alike(run: str, kept: str) -> bool:
    """The same words and whole numbers. Fractions may differ a little: another CPU adds in another order."""
    if NUMBER.split(run) != NUMBER.split(kept):
        return False
    pairs = zip(NUMBER.findall(run), NUMBER.findall(kept), strict=True)
    return all(
        a == b or (not (a + b).isdigit() and math.isclose(float(a), float(b), rel_tol=0.05, abs_tol=1e-5))
        for a, b in pairs
    )


def test_other_words_and_other_counts_are_noticed_and_the_last_digits_are_not() -> None:
    assert alike("error 1.9e-07, 3 rows, 12.25 dB", "error 3e-07, 3 rows, 12.24 dB")
    assert not alike("2 x exp2", "3 x exp2")
    assert not alike("error 0.1", "error 0.2")
    assert not alike("row 3", "column 3")
    assert not alike("1 2", "1")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_runs(
    path: Path, pairing: Any, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed = TOOLCHAINS.get(path.name[:2])
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    # The kernel starts in the notebooks' folder: it sees the tree as this process does, or what is installed.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if pytestconfig.getini("pythonpath"):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # no settings and no history of the user
    for name in ("COV_CORE_SOURCE", "COV_CORE_CONFIG", "COV_CORE_DATAFILE", "TRITON_INTERPRET", "MLA_STRICT"):
        monkeypatch.delenv(name, raising=False)
    run = pairing.executed(path)
    committed = pairing.read(path.with_suffix(".ipynb"))
    assert [kinds(cell) for cell in run.cells] == [kinds(cell) for cell in committed.cells]
    for now, kept in zip(run.cells, committed.cells, strict=True):
        if torch.cuda.is_available():
            break  # the committed outputs are those of a machine without a GPU
        assert alike(printed(now), printed(kept)), f"`make notebooks` was not run:\n{printed(now)}\n{printed(kept)}"
