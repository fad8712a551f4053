"""The import contracts hold, and each of them can fail: a planted import is found, by the contract that is meant."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("importlinter", reason="import-linter is not installed")

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")

PLANTED = {
    "the reference imports no kernel": ("reference/runner.py", "import mla.backends.xqa"),
    "no kernel imports the reference": ("backends/xqa/__init__.py", "from mla.reference import batched"),
    "no kernel imports another kernel": ("backends/xqa/__init__.py", "import mla.backends.trtllm_gen"),
    "mla.testing imports no backend by name": ("mla/testing/case.py", "from mla.reference.runner import backend"),
    "nothing but `python -m mla` imports the command line": ("mla/decode.py", "import mla.cli"),
    "nothing but the command line imports the demo": ("mla/decode.py", "from mla.demo import run"),
    "nothing but the command line imports the bench": ("mla/demo/run.py", "from mla.bench import cases"),
    "nothing but the demo, the bench and the command line imports mla.testing": (
        "reference/literal.py",
        "import mla.testing.case",
    ),
    "triton is imported by its backend alone": ("backends/xqa/__init__.py", "import triton.language"),
    "numba is imported by its backend alone": ("mla/decode.py", "def late():\n    from numba import cuda"),
}


@pytest.fixture
def tree(source_tree: Path, tmp_path: Path) -> Path:
    """A copy of the source code, to plant imports in."""
    for name in ("mla", "reference", "backends"):
        shutil.copytree(source_tree / name, tmp_path / name, symlinks=True)
    shutil.copy(source_tree / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_contract_is_kept(tree: Path, command: Any) -> None:
    told = command(*LINT, cwd=tree).stdout
    assert f"Contracts: {len(PLANTED)} kept, 0 broken." in told


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(contract: str, tree: Path, command: Any) -> None:
    file, line = PLANTED[contract]
    with (tree / file).open("a") as source:
        source.write(f"\n{line}\n")
    told = command(*LINT, cwd=tree, status=1).stdout
    assert f"{contract} BROKEN" in told
