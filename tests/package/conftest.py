"""Fresh processes, built distributions and virtual environments. Nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("mla", "reference", "backends", "tests", "docs", "notebooks", ".ci")
NOT_INHERITED = ("PYTHON", "PYTEST", "COV_", "COVERAGE", "MLA_", "VIRTUAL_ENV", "MAKE", "MFLAGS")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would steer another Python, and with `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_INDEX": "1", "PIP_NO_INPUT": "1"} | changes


def run(
    *command: object, cwd: Path, status: int = 0, seconds: int = 300, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and hold it to its exit status; a failure shows all that it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == status, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass(frozen=True)
class Built:
    """The two distributions."""

    wheel: Path
    sdist: Path


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown document, and the heading above it."""

    heading: str
    language: str
    text: str


def code_blocks(document: Path) -> list[Block]:
    """The document's fenced blocks, in order."""
    blocks, heading = [], ""
    found = re.finditer(
        r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w*)\n(?P<text>.*?)^```$", document.read_text(), re.M | re.S
    )
    for match in found:
        if match["text"] is None:
            heading = match["heading"]
        else:
            blocks.append(Block(heading, match["language"], match["text"]))
    return blocks


@pytest.fixture(scope="session")
def blocks_of(root: Path) -> Callable[[str], list[Block]]:
    """blocks_of("README.md")."""
    return lambda name: code_blocks(root / name)


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, links as links, to build in and to break."""
    copy = tmp_path_factory.mktemp("tree") / "mla-source"
    copy.mkdir()
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def built(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist of the tree, and a wheel made from that sdist."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source_tree, cwd=dist)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def make_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_python(name, *what pip installs) -> the interpreter of a new virtual environment.

    It sees the packages of the running one through a path file, so torch is not installed again. A path file does not
    bring in the running one's editable installs.
    """

    def make(name: str, *install: object) -> Path:
        home = tmp_path_factory.mktemp(name)
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).stdout.strip()
        seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        Path(site, "the_running_one.pth").write_text("\n".join(seen))
        if install:
            quiet = ("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed")
            run(python, "-m", "pip", "install", *quiet, *install, cwd=home)
        return python

    return make


@pytest.fixture(scope="session")
def bare_python(make_python: Callable[..., Path]) -> Path:
    """An interpreter with torch in which mla is not installed."""
    return make_python("bare")


@pytest.fixture(scope="session")
def wheel_python(make_python: Callable[..., Path], built: Built) -> Path:
    """An interpreter with the wheel installed."""
    return make_python("wheel", built.wheel)
