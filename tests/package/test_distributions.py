"""What the wheel and the sdist hold."""

from __future__ import annotations

import os
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import mla

FOLDERS = {"mla": "mla", "reference": "mla/reference", "backends": "mla/backends"}


@pytest.fixture(scope="session")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def in_wheel(built: Any) -> set[str]:
    return set(zipfile.ZipFile(built.wheel).namelist())


@pytest.fixture(scope="session")
def in_sdist(built: Any) -> set[str]:
    with tarfile.open(built.sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def modules(root: Path) -> dict[str, str]:
    """Each module of the three folders: its path in the tree -> its path in the package."""
    found = {}
    for folder, package in FOLDERS.items():
        for here, folders, files in os.walk(root / folder):  # does not follow the links
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in files:
                if name.endswith((".py", ".typed")):
                    path = Path(here, name).relative_to(root)
                    found[str(path)] = str(Path(package, path.relative_to(folder)))
    return found


def test_the_package_list_names_every_package_on_disk(project: dict[str, Any], source_tree: Path) -> None:
    on_disk = {
        str(Path(name).parent).replace("/", ".")
        for name in modules(source_tree).values()
        if name.endswith("__init__.py")
    }
    assert sorted(on_disk) == project["tool"]["setuptools"]["packages"]


def test_every_folder_of_modules_is_a_package(source_tree: Path) -> None:
    names = modules(source_tree).values()
    assert {str(Path(name).parent) for name in names} == {
        str(Path(n).parent) for n in names if n.endswith("__init__.py")
    }


def test_the_links_are_relative_and_stay_in_the_tree(source_tree: Path) -> None:
    assert {name: os.readlink(source_tree / "mla" / name) for name in ("reference", "backends")} == {
        "reference": "../reference",
        "backends": "../backends",
    }


def test_entry_points_are_the_built_in_backends(project: dict[str, Any]) -> None:
    assert project["project"]["entry-points"]["mla.backends"] == mla.registry.BUILT_IN


def test_the_wheel_holds_every_module_and_data_file_once_and_nothing_else(
    in_wheel: set[str], source_tree: Path
) -> None:
    data = {str(path.relative_to(source_tree)) for path in source_tree.glob("mla/*/data/*")}
    assert data == {"mla/bench/data/decode_batches.json", "mla/bench/data/ATTRIBUTION.md"}
    assert {name for name in in_wheel if ".dist-info/" not in name} == set(modules(source_tree).values()) | data


def test_the_wheel_is_typed_and_licensed(in_wheel: set[str]) -> None:
    assert "mla/py.typed" in in_wheel
    assert f"mla-{mla.__version__}.dist-info/licenses/LICENSE" in in_wheel


def test_the_sdist_holds_sources_tests_and_documents(in_sdist: set[str], source_tree: Path) -> None:
    kept = ("tests", "docs", "notebooks")
    held = {
        str(path.relative_to(source_tree))
        for folder in kept
        for path in (source_tree / folder).rglob("*.*")
        if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts)
    }
    documents = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt", ".ci/run"}
    assert set(modules(source_tree)) | held | documents | {"mla/bench/data/decode_batches.json"} <= in_sdist
    assert not {name for name in in_sdist if name.startswith(("mla/reference", "mla/backends"))}


def test_every_tool_that_the_two_commands_install_is_pinned(project: dict[str, Any], source_tree: Path) -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (source_tree / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = project["project"]["optional-dependencies"]
    asked = project["project"]["dependencies"] + extras["demo"] + extras["lint"] + extras["numba"] + extras["test"]
    names = {requirement.partition(">")[0].lower() for requirement in asked}
    assert names - pinned == {"pip"}  # the one that the virtual environment comes with
