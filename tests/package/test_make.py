"""The Makefile: what its targets are, and in which order they install. Nothing is installed here."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_every_make_target_explains_itself(root: Path, command: Any) -> None:
    told = command("make", "help", cwd=root).stdout
    phony = re.findall(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.M)[0].split()
    assert [line.split()[1] for line in told.splitlines()] == phony


@pytest.mark.parametrize("target", ["demo", "test"])
def test_pinned_torch_comes_first(target: str, root: Path, command: Any, tmp_path: Path) -> None:
    told = command("make", "--dry-run", target, f"VENV={tmp_path / 'venv'}", cwd=root).stdout
    installs = [line for line in told.splitlines() if " pip install " in line]
    assert all("--constraint constraints.txt" in line for line in installs)
    assert [line.split()[-1] for line in installs[:2]] == ["wheel", "torch"]
    assert "--no-build-isolation --editable '.[demo" in installs[2]
    assert "dev" not in told


def test_the_demo_needs_no_kernel_toolchain(root: Path, command: Any, tmp_path: Path) -> None:
    told = command("make", "--dry-run", "demo", f"VENV={tmp_path / 'venv'}", cwd=root).stdout
    assert not re.search("triton|numba", told)


def test_the_tests_bring_a_triton_only_where_torch_brings_none(root: Path, command: Any, tmp_path: Path) -> None:
    """The recipe's question, asked of this interpreter with and without a Triton in reach."""
    told = command("make", "--dry-run", "test", f"VENV={tmp_path / 'venv'}", "TRITON=triton==1.2.3", cwd=root).stdout
    question, install = re.search(r"python -c '([^']*)' \\\n\t*\|\| (.*)", told).groups()  # type: ignore[union-attr]
    assert install.endswith("'triton==1.2.3'")
    (tmp_path / "triton.py").touch()
    command(sys.executable, "-c", question, cwd=tmp_path)
    blind = f"import importlib.util; importlib.util.find_spec = lambda name: None\n{question}"
    command(sys.executable, "-c", blind, cwd=tmp_path, status=int(sys.platform == "linux"))


def test_a_second_run_installs_nothing(root: Path, command: Any, tmp_path: Path) -> None:
    for stamp in (".torch", ".demo", ".test"):
        (tmp_path / stamp).touch()
    assert "pip install" not in command("make", "--dry-run", "demo", "test", f"VENV={tmp_path}", cwd=root).stdout
