"""Every planted fault is noticed by at least two cases of the suite, and the page that says so is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla.testing.faults import FAULTS, matrix

PAGE = Path(__file__).parents[2] / "docs" / "kill_matrix.md"


def rows() -> dict[str, list[str]]:
    """Fault -> the cells of its row on the page."""
    lines = [
        line.strip("| \n") for line in PAGE.read_text().splitlines() if line.startswith("| ") and " --- " not in line
    ]
    cells = [line.split(" | ") for line in lines[1:]]
    return {cell[0].split(": ", 1)[1]: cell for cell in cells}


MEASURED = next(iter(FAULTS))  # one row runs every line of the matrix


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == MEASURED else pytest.mark.no_cover) for name in FAULTS]
)
def test_a_fault_is_noticed_by_two_cases_or_more_as_the_page_says(name):
    kills = matrix.row(FAULTS[name])
    assert sum(kills.values()) >= 2
    fault, sentence, _, noticed = rows()[name]
    assert fault == f"{FAULTS[name].family}: {name}"
    assert sentence == FAULTS[name].sentence.replace("|", "\\|")
    told = {words.rsplit(" ", 1)[0]: int(words.rsplit(" ", 1)[1]) for words in noticed.split(", ")}
    # One case at the edge of its budget may fall on either side with another CPU's order of summation; two may not.
    assert {prop for prop, count in told.items() if count >= 2} <= set(kills)
    assert {prop for prop, count in kills.items() if count >= 2} <= set(told)


def test_the_page_has_every_fault_and_its_closing_line_is_true():
    assert list(rows()) == list(FAULTS)
    fewest = min(int(cells[2]) for cells in rows().values())
    assert PAGE.read_text().endswith(
        f"\n{len(FAULTS)} of {len(FAULTS)} faults are noticed, each by at least {fewest} cases.\n"
    )


def test_a_page_is_made_of_rows():
    text = matrix.page({name: {"mask": 2, "sinks": 1} for name in list(FAULTS)[:2]})
    assert text.startswith("# The kill matrix")
    assert text.count("| 3 | mask 2, sinks 1 |") == 2
    assert text.endswith("2 of 2 faults are noticed, each by at least 3 cases.\n")
