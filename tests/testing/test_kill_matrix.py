"""Every planted fault is noticed by at least two cases of the suite, and the page that says so is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla.testing.faults import FAULTS, matrix

PAGE = Path(__file__).parents[2] / "docs" / "kill_matrix.md"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed_by_two_cases_or_more_as_the_page_says(name):
    kills = matrix.row(FAULTS[name])
    assert sum(kills.values()) >= 2
    assert matrix.line(FAULTS[name], kills) in PAGE.read_text().splitlines()


def test_the_page_has_every_fault_and_its_closing_line_is_true():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and " --- " not in line][1:]
    assert len(rows) == len(FAULTS)
    fewest = min(int(line.split(" | ")[2]) for line in rows)
    assert PAGE.read_text().endswith(
        f"\n{len(FAULTS)} of {len(FAULTS)} faults are noticed, each by at least {fewest} cases.\n"
    )


def test_a_page_is_made_of_rows():
    rows = {name: {"mask": 2, "sinks": 1} for name in list(FAULTS)[:2]}
    text = matrix.page(rows)
    assert text.startswith("# The kill matrix")
    assert text.count("| 3 | mask 2, sinks 1 |") == 2
    assert text.endswith("2 of 2 faults are noticed, each by at least 3 cases.\n")
