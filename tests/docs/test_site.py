"""The built pages: complete, whole inside, in need of no network, and made from the code where they speak of it."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import mla
import mla.testing
from mla.cli.capability_table import capability_table
from mla.dispatch import AUTO_ORDER

MADE_BY_SPHINX = {"genindex", "search"}


def test_every_document_and_notebook_is_a_page(site: Any, docs: Path, root: Path) -> None:
    expected = {path.stem for path in docs.glob("*.md")}
    expected |= {f"notebooks/{path.stem}" for path in (root / "notebooks").glob("*.ipynb")}
    assert set(site.pages) == expected | MADE_BY_SPHINX


def test_every_page_can_be_reached_from_the_first(site: Any) -> None:
    reached, new = {"index"}, ["index"]
    while new:
        page = new.pop()
        for target in inside(site, page):
            if target.endswith(".html") and (name := target.removesuffix(".html")) not in reached:
                reached.add(name)
                new.append(name)
    assert reached >= set(site.pages) - {"search"}  # the field on every page leads there


def inside(site: Any, name: str) -> dict[str, str]:
    """Links of a page that stay on the site: file -> anchor."""
    folder = site.pages[name].path.parent
    found = {}
    for link in site.pages[name].links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc and parts.path:
            found[str((folder / unquote(parts.path)).resolve().relative_to(site.folder.resolve()))] = parts.fragment
    return found


def test_no_link_and_no_anchor_is_broken(site: Any) -> None:
    broken = []
    for name, page in site.pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
            if not target.exists():
                broken.append(f"{name}: {link} leads to no file")
            elif parts.fragment and target.suffix == ".html":
                other = str(target.relative_to(site.folder.resolve()).with_suffix(""))
                if unquote(parts.fragment) not in site.pages[other].anchors:
                    broken.append(f"{name}: {link} leads to no anchor")
    assert broken == []


def test_a_reader_needs_no_network(site: Any) -> None:
    loaded = {load for page in site.pages.values() for load in page.loads}
    assert [load for load in sorted(loaded) if urlsplit(load).netloc] == []


@pytest.mark.parametrize(("name", "least"), [("contract", 8), ("index", 1), ("performance", 1)])
def test_formulas_are_formulas(name: str, least: int, site: Any) -> None:
    page = site.pages[name]
    assert page.count("math", display="block") >= least
    assert "$$" not in page.text
    assert "\\frac" not in page.text


def test_no_mark_is_left(site: Any) -> None:
    for page in site.pages.values():
        assert not re.search(r"<!-- (generated|printed|not run)", page.path.read_text())


def test_the_design_is_drawn_with_every_room(site: Any, root: Path) -> None:
    page = site.pages["design"]
    assert page.count("svg", role="img") == 1
    backends = {target.split(":")[0].rpartition(".")[2] for target in mla.registry.BUILT_IN.values()}
    for word in ("mla/", "reference/", "backends/", "mla.testing", *(backends - {"reference"})):
        assert word in page.text
    for name in re.findall(r"\b(\w+\.py)\b", (root / "docs/_static/design.svg").read_text()):
        assert (root / "mla" / name).exists() or (root / "reference" / name).exists()


def test_measurements_are_shown_with_gpu_versions_and_commit_or_missed_in_one_sentence(site: Any, root: Path) -> None:
    page = site.pages["performance"]
    records = sorted((root / "benchmarks/results/bench").glob("**/*.json"))
    if not records:
        assert "There are no measurements in this tree yet" in page.text
        return
    for path in records:
        about = json.loads(path.read_text())["about"]
        for word in ("device", "torch", "commit"):
            assert about[word] in page.text
    shown = [found for tag, found in page.tags if tag == "img" and "pictures" not in str(found.get("class"))]
    assert {"Work over time, under the measured ceilings", "Time over the floor of each case"} <= {
        found.get("alt") for found in shown
    }


def test_what_ran_and_what_was_only_compiled_is_told_per_backend(site: Any) -> None:
    for name in ("backends", "performance"):
        text = site.pages[name].text
        assert "ran on, with a record here" in text
        assert "compiled ahead of time, not run here" in text


def test_the_tables_are_those_of_the_code(site: Any) -> None:
    text = site.pages["backends"].text
    for row in capability_table().rows:
        for cell in row:
            assert cell.strip("`") in text
    order = re.sub(r"\s*,\s*", ",", site.pages["explain"].text)
    for (major, minor), names in AUTO_ORDER.items():
        assert re.search(rf"sm_{major}{minor}(,sm_\d+)* {','.join(names)}", order)


def test_every_public_name_is_documented(site: Any) -> None:
    for name in mla.__all__:
        assert f"mla.{name}" in site.pages["api"].anchors
    for name in mla.testing.__all__:
        assert f"mla.testing.{name}" in site.pages["api_testing"].anchors


def test_the_changelog_is_the_file(site: Any, root: Path) -> None:
    headings = re.findall(r"^#+ \[?([^\]\n]+)", (root / "CHANGELOG.md").read_text(), re.M)
    assert headings
    assert all(heading in site.pages["changelog"].text for heading in headings)


class TestFlashInfer:
    @pytest.fixture
    def rows(self, docs: Path) -> dict[str, list[str]]:
        data = json.loads((docs / "_ext" / "flashinfer_signatures.json").read_text())
        return {row["versions"]: row["after_max_seq_len"] for row in data["rows"]}

    def test_our_first_parameters_are_those_of_the_versions_that_the_page_names(
        self, rows: dict[str, list[str]], site: Any
    ) -> None:
        ours = list(inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla).parameters.values())
        positional = [each.name for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert positional[9:] == rows["0.6.0 to 0.6.3"]
        assert "those of FlashInfer 0.6.0 to 0.6.3" in site.pages["flashinfer"].text

    def test_every_newer_parameter_is_told_of(self, rows: dict[str, list[str]], docs: Path) -> None:
        text = (docs / "flashinfer.md").read_text()
        table = text[text.index("## What becomes of each newer parameter") : text.index("## Where the result differs")]
        ours = inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla).parameters
        newer = {name for names in rows.values() for name in names} - set(rows["0.6.0 to 0.6.3"])
        told = {
            name: "not taken" not in line
            for line in table.splitlines()
            for name in re.findall(r"`(\w+)`", line.split("|")[1] if line.count("|") == 3 else "")
        }
        assert told == {name: name in ours for name in newer}
