"""The committed .ipynb files: the cells of their .py, the outputs of a run, small, and free of noise."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
each_notebook = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
needs_jupytext = pytest.mark.skipif(importlib.util.find_spec("jupytext") is None, reason="jupytext is not installed")


def committed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_suffix(".ipynb").read_text())
    return found


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in committed(path)["cells"] if cell["cell_type"] == "code"]


def test_notebooks_come_in_pairs() -> None:
    assert SOURCES
    assert {path.stem for path in SOURCES} == {path.stem for path in FOLDER.glob("*.ipynb")}


def test_numbers_follow_each_other() -> None:
    assert [path.name[:2] for path in SOURCES] == [f"{i + 1:02}" for i in range(len(SOURCES))]


def test_the_readme_has_one_line_for_each() -> None:
    lines = re.findall(r"^\| \[(\S+)\]\((\S+)\.ipynb\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert [name for _, name in lines] == [path.stem for path in SOURCES]
    assert [number for number, _ in lines] == [path.name[:2] for path in SOURCES]


@needs_jupytext
@each_notebook
def test_both_files_hold_the_same_cells(path: Path, pairing: Any) -> None:
    source, notebook = pairing.read(path), pairing.read(path.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in source.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]


@needs_jupytext
@each_notebook
def test_jupytext_writes_the_one_from_the_other(path: Path, pairing: Any) -> None:
    import jupytext

    assert jupytext.writes(pairing.read(path.with_suffix(".ipynb")), fmt="py:percent") == path.read_text()


@each_notebook
def test_the_outputs_are_those_of_one_run_from_a_clean_kernel(path: Path) -> None:
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_a_cell_that_prints_or_draws_has_its_output(path: Path) -> None:
    for cell in code_cells(path):
        text, shown = "".join(cell["source"]), cell["outputs"]
        if re.search(r"^(print|check)\(", text, re.M):
            assert any(output.get("name") == "stdout" for output in shown), text
        if re.search(r"^plt\.show\(\)", text, re.M):
            assert any("image/png" in output.get("data", {}) for output in shown), text


@each_notebook
def test_no_output_is_an_error_or_noise(path: Path) -> None:
    for cell in code_cells(path):
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", output["text"]
        assert sum(output.get("name") == "stdout" for output in cell["outputs"]) <= 1  # in one piece


@each_notebook
def test_the_file_is_small_and_no_line_of_output_is_long(path: Path, pairing: Any) -> None:
    assert path.with_suffix(".ipynb").stat().st_size < pairing.LARGEST
    for cell in code_cells(path):
        for output in cell["outputs"]:
            assert all(len(line) <= 160 for line in "".join(output.get("text", [])).splitlines())


@each_notebook
def test_outputs_name_no_folder_of_this_machine(path: Path) -> None:
    for cell in code_cells(path):
        for output in cell["outputs"]:
            if not output.get("data", {}).get("image/png"):
                assert not re.search(r"/(home|root|tmp|usr|Users)/|site-packages", json.dumps(output))


@each_notebook
def test_a_notebook_begins_with_its_number_and_states_one_idea(path: Path) -> None:
    cells = committed(path)["cells"]
    first = "".join(cells[0]["source"])
    assert re.match(rf"# {int(path.name[:2])}\. ", first)
    assert "**The one idea of this notebook:**" in first
    assert 'check("' in "".join("".join(cell["source"]) for cell in cells)


def test_the_extras_bring_all_that_a_run_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split("[>=;<]", one)[0] for one in extras[extra]} for extra in ("notebooks", "test")}
    assert {"jupytext", "nbclient", "nbformat", "ipykernel", "matplotlib", "numpy"} <= names["notebooks"] & names[
        "test"
    ]
