"""What pages are made of at build time, piece by piece: with records and without, with code that prints and that raises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sphinx = pytest.importorskip("sphinx", reason="the documentation needs the docs extra")

from mla.bench.cases import BenchCase  # noqa: E402
from mla.bench.floors import Ceilings  # noqa: E402
from mla.bench.results import Results, Row  # noqa: E402

CEILINGS = Ceilings(copy_gbs=4000.0, read_gbs=4100.0, bf16_tflops=700.0, empty_graph_us=4.0)


@pytest.fixture
def extensions(docs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(docs / "_ext"))
    import generated
    import measured

    yield SimpleNamespace(generated=generated, measured=measured)
    for name in ("generated", "measured"):
        sys.modules.pop(name)


@pytest.fixture
def app(tmp_path: Path) -> Any:
    """As much of Sphinx as the makers look at, over an empty tree."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results" / "bench").mkdir(parents=True)
    return SimpleNamespace(srcdir=str(tmp_path / "docs"), doctreedir=str(tmp_path / "doctrees"))


def save(app: Any, name: str, device: str, *rows: Row) -> None:
    case = BenchCase("tiny", lengths=(64, 64), heads=16)
    about = {"device": device, "mla": "0.1.0", "torch": "2.9.0", "date": "2026-01-02 03:04 UTC", "commit": "abc"}
    contenders = {"trtllm-gen": {"kind": "backend", "version": ""}, "flashmla": {"kind": "peer", "version": "1.0.0"}}
    timed = [row.timed(case, CEILINGS) for row in rows]
    results = Results(about, {}, contenders, [], False, CEILINGS, [case], timed)
    results.save(Path(app.srcdir).parent / "benchmarks" / "results" / "bench" / name)


RIGHT = Row("tiny", "trtllm-gen", "backend", "right", eager_us=12.34, graph_us=10.0)
WRONG = Row("tiny", "flashmla", "peer", "wrong", "row 3 is off by 0.7")


def test_without_records_the_page_says_so_in_one_sentence(extensions: Any, app: Any) -> None:
    told = extensions.measured.performance(app)
    assert told.startswith("There are no measurements in this tree yet")
    assert told.count(". ") == 0
    assert "| `xqa` | - | - |" in extensions.measured.where_it_ran(app)


def test_a_record_becomes_a_section_with_its_gpu_versions_commit_times_and_pictures(extensions: Any, app: Any) -> None:
    save(app, "a.json", "NVIDIA H200", RIGHT, WRONG)
    told = extensions.measured.performance(app)
    for words in ("## NVIDIA H200", "torch 2.9.0", "commit abc", "flashmla 1.0.0", "| 10.0 ("):
        assert words in told
    assert "* `tiny`, `flashmla`: wrong. row 3 is off by 0.7" in told
    pictures = [line.partition("](")[2].rstrip(")") for line in told.splitlines() if line.startswith("![")]
    assert len(pictures) == 2
    assert all((Path(app.srcdir) / picture).is_file() for picture in pictures)


def test_devices_have_sections_of_their_own(extensions: Any, app: Any) -> None:
    save(app, "a.json", "NVIDIA H200", RIGHT)
    save(app, "b.json", "NVIDIA B200", RIGHT)
    told = extensions.measured.performance(app)
    assert told.index("## NVIDIA H200") < told.index("## NVIDIA B200")


def test_a_chip_that_ran_is_not_listed_as_only_compiled(extensions: Any, app: Any) -> None:
    table = "Limits: sm_75.\n\n| chip | registers |\n| --- | --- |\n| sm_90a | 9 |\n| sm_100a | 9 |\n| sm_80 | 9 |\n"
    Path(app.srcdir, "aot_trtllm_gen.md").write_text(table)
    save(app, "a.json", "NVIDIA H200", RIGHT)
    (Path(app.srcdir).parent / "benchmarks" / "results" / "other.json").write_text(json.dumps({"note": "no device"}))
    assert "| `trtllm-gen` | NVIDIA H200 | sm_80, sm_100 |" in extensions.measured.where_it_ran(app)


@pytest.mark.parametrize(
    ("device", "chip"),
    [("NVIDIA H200", "sm_90"), ("NVIDIA GB200", "sm_100"), ("NVIDIA GeForce RTX 5090", "sm_120"), ("NVIDIA L40S", "sm_89"),
     ("NVIDIA RTX PRO 6000 Blackwell", "sm_120"), ("something else", None)],
)  # fmt: skip
def test_a_gpu_is_known_by_its_name(device: str, chip: str | None, extensions: Any) -> None:
    assert extensions.measured.chip_of(device) == chip


def test_blocks_run_in_order_and_what_they_print_is_shown(extensions: Any) -> None:
    page = "```python\nx = 1\nprint(x)\n```\n\n```python\nprint(x + 1)\n```\n\n<!-- printed -->\n"
    assert extensions.generated.run_blocks(page, "page").endswith("```text\n1\n2\n```\n")


def test_a_block_that_raises_stops_the_build(extensions: Any) -> None:
    with pytest.raises(sphinx.errors.ExtensionError, match="page raised ZeroDivisionError"):
        extensions.generated.run_blocks("```python\n1 / 0\n```\n", "page")


def test_a_block_that_is_not_run_must_still_be_python(extensions: Any) -> None:
    shown = extensions.generated.run_blocks("<!-- not run: no GPU -->\n```python\n1 / 0\n```\n", "page")
    assert shown == "```python\n1 / 0\n```\n"
    with pytest.raises(SyntaxError):
        extensions.generated.run_blocks("<!-- not run: no GPU -->\n```python\nif\n```\n", "page")


def test_a_link_to_the_notebook_beside_leads_to_its_page(extensions: Any) -> None:
    known = SimpleNamespace(env=SimpleNamespace(found_docs={"notebooks/02_paged"}))
    content = ["[next](02_paged.ipynb), [none](03_other.ipynb)"]
    extensions.generated.fill(known, "notebooks/01_first", content)
    assert content == ["{doc}`next </notebooks/02_paged>`, [none](03_other.ipynb)"]
