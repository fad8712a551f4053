"""The documentation, built once per run of the suite with every warning an error, whichever worker comes first."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import filelock
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif found.get("src"):
            self.loads.append(str(found["src"]))
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(str(found["href"]))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@dataclass
class Page:
    """What a built page holds.

    Attributes:
        path: its file. anchors: ids on it. links: targets of its links. loads: what it needs besides.
        tags: (tag, attributes) of every element. text: all words.
    """

    path: Path
    anchors: set[str]
    links: list[str]
    loads: list[str]
    tags: list[tuple[str, dict[str, str | None]]] = field(repr=False)
    text: str = field(repr=False)

    def count(self, tag: str, **attributes: str) -> int:
        """Elements of that name with these attributes."""
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.tags)


@dataclass
class Site:
    """The built documentation."""

    folder: Path
    pages: dict[str, Page]


def read(path: Path) -> Page:
    reader = _Reader()
    reader.feed(path.read_text())
    words = " ".join(" ".join(reader.text).split())
    return Page(path, reader.anchors, reader.links, reader.loads, reader.tags, words)


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", DOCS, folder / "html"]
    environment = {name: value for name, value in os.environ.items() if name != "MLA_DOCS_ONLINE"}
    done = subprocess.run(
        [*command, "-d", folder / "doctrees"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"the documentation does not build:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The pages, built here or by the worker that was first."""
    pytest.importorskip("sphinx", reason="the documentation needs the docs extra")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "documentation"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            build(folder)
            (folder / "done").touch()
    html = folder / "html"
    paths = sorted(path for path in html.rglob("*.html") if "_static" not in path.parts)
    return Site(html, {str(path.relative_to(html).with_suffix("")): read(path) for path in paths})


@pytest.fixture(scope="session")
def docs() -> Path:
    return DOCS


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
