"""What builds the pages is installed by name and version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", requirement)[0].lower() for requirement in requirements}


def test_the_tests_install_what_the_documentation_needs_and_all_of_it_is_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert names(extras["docs"]) <= names(extras["test"])
    assert names(extras["docs"]) <= {name.lower().replace("_", "-") for name in pinned}


def test_make_docs_takes_every_warning_for_an_error() -> None:
    (recipe,) = re.findall(r"^docs: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert "-m sphinx -W --keep-going -n docs build/docs" in recipe
