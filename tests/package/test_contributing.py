"""CONTRIBUTING's "Add a backend" works: its steps are followed to the letter, in an empty folder."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

STEP = re.compile(r"\d+\. ")


@pytest.fixture(scope="session")
def steps(blocks_of: Any) -> list[Any]:
    """The code blocks of the steps, in order."""
    return [block for block in blocks_of("CONTRIBUTING.md") if STEP.match(block.heading)]


def file_name(block: Any) -> str | None:
    """The file that a block is to be written to: its first line says so."""
    match = re.match(r"# ([\w/]+\.\w+)\n", block.text)
    return match and match[1]


def write_files(steps: list[Any], folder: Path) -> None:
    for block in steps:
        name = file_name(block)
        if name is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block.text)


def test_there_are_at_most_ten_steps(root: Path) -> None:
    numbers = re.findall(r"^### (\d+)\. ", (root / "CONTRIBUTING.md").read_text(), re.M)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert len(numbers) <= 10


def test_the_steps_work(steps: list[Any], make_python: Any, built: Any, command: Any, tmp_path: Path) -> None:
    python = make_python("contributor", built.wheel)
    told: dict[str, str] = {}
    for block in steps:
        name = file_name(block)
        if name is not None:
            write_files([block], tmp_path)
        elif block.language == "bash":
            script = block.text.replace("pip install", "pip install --no-build-isolation")  # nothing is downloaded here
            path = f"{python.parent}:/usr/bin:/bin"
            done = command("bash", "-euo", "pipefail", "-c", script, cwd=tmp_path, PATH=path)
            told[block.heading] = done.stdout
        else:
            command(python, "-c", block.text, cwd=tmp_path)
    listed = [line.split(maxsplit=3) for line in told["5. See what it says"].splitlines() if line.startswith("plain")]
    assert listed == [
        ["plain", "plain-mla", "accepts", "-"],
        ["plain", "plain-mla", "refused", "the call is sparse (top 64); it does dense only"],
    ]
    judged = told["7. Run the tests, and bring it before the judge"]
    assert "4 passed" in judged
    assert " 0 fail" in judged


def test_the_move_into_the_repository_works(
    steps: list[Any], source_tree: Path, bare_python: Path, command: Any, tmp_path: Path
) -> None:
    for name in ("mla", "reference", "backends"):
        shutil.copytree(source_tree / name, tmp_path / name, symlinks=True)
    write_files(steps, tmp_path / "backends")
    (tmp_path / "backends" / "pyproject.toml").unlink()
    for module in (tmp_path / "backends" / "plain_mla").glob("*.py"):
        module.write_text(module.read_text().replace("from plain_mla", "from mla.backends.plain_mla"))
    replace(
        tmp_path / "mla" / "registry.py",
        '    "xqa": "mla.backends.xqa:backend",\n',
        '    "xqa": "mla.backends.xqa:backend",\n    "plain": "mla.backends.plain_mla:backend",\n',
    )
    project = tmp_path / "pyproject.toml"
    shutil.copy(source_tree / "pyproject.toml", project)
    replace(
        project,
        'modules = ["mla.backends.trtllm_gen",',
        'modules = ["mla.backends.plain_mla", "mla.backends.trtllm_gen",',
    )

    told = command(bare_python, "-m", "mla", "backends", cwd=tmp_path).stdout
    assert ["plain", "mla", "accepts", "-"] in [line.split() for line in told.splitlines()]
    told = command(bare_python, "-m", "mla", "backends", "--markdown", cwd=tmp_path).stdout
    assert "| `plain` | runs | cpu | bf16 | bf16, fp16, fp32 | dense | no | yes | Q <= 1 |" in told
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    assert " 0 broken." in command(sys.executable, "-c", lint, "--no-cache", cwd=tmp_path).stdout


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
