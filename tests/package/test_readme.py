"""What the README shows is what happens."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mla.cli import COMMANDS
from mla.cli.capability_table import capability_table
from mla.cli.tables import markdown

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


def test_the_python_blocks_run_in_order_and_print_what_stands_below_them(
    blocks_of: Any, bare_python: Path, source_tree: Path, command: Any
) -> None:
    blocks = blocks_of("README.md")
    pairs = [
        (code.text, shown.text)
        for code, shown in pairwise(blocks)
        if code.language == "python" and shown.language == "text"
    ]
    assert len(pairs) == sum(block.language == "python" for block in blocks) == 3
    program = "".join(code for code, _ in pairs)
    assert command(bare_python, "-c", program, cwd=source_tree).stdout == "".join(shown for _, shown in pairs)


def test_the_quick_start_is_short(blocks_of: Any) -> None:
    (quick_start,) = (
        block for block in blocks_of("README.md") if block.heading == "Quick start" and block.language == "python"
    )
    assert 10 <= sum(bool(line.strip()) and not line.startswith("#") for line in quick_start.text.splitlines()) <= 20


def test_the_table_of_backends_is_the_generated_one(root: Path) -> None:
    text = (root / "README.md").read_text()
    (table,) = re.findall(r"<!-- backends: begin\..*?-->\n\n(.*?)\n\n<!-- backends: end -->", text, re.S)
    assert table == markdown(capability_table()), "put the output of `mla backends --markdown` between the two comments"


def test_the_two_commands_come_first(blocks_of: Any) -> None:
    shown = blocks_of("README.md")[0].text.splitlines()
    assert [line.split("#")[0].strip() for line in shown] == ["make demo", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_that_is_shown_exists(document: str, root: Path) -> None:
    text = (root / document).read_text()
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.M))
    shown = re.findall(r"(?:^|`)make ([a-z]+)", text, re.M)
    assert set(shown) <= targets
    assert set(re.findall(r"(?:^|`|-m )mla ([a-z]+)", text, re.M)) <= set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_is_there(document: str, root: Path) -> None:
    text = (root / document).read_text()
    linked = {target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target}
    named = set(re.findall(r"`((?:tests|reference|backends|mla|docs)/[\w/.]+)`", text)) - {"backends/plain_mla"}
    assert [name for name in sorted(linked | named) if not (root / name).exists()] == []
