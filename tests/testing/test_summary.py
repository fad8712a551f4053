"""The page about kernels of others says what the committed reports say."""

from __future__ import annotations

import json
from pathlib import Path

from mla.testing import summary

ROOT = Path(__file__).parents[2]
REPORTS = sorted((ROOT / "benchmarks" / "results" / "oracle").glob("*.json"))


def test_the_page_is_the_committed_reports(capsys):
    assert len(REPORTS) >= 4
    assert summary.main([str(path) for path in REPORTS]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "foreign_kernels.md").read_text()


def test_every_report_says_what_it_was_measured_with():
    for path in REPORTS:
        about = json.loads(path.read_text())["about"]
        assert {"mla", "torch", "triton", "python", "date", "device", "commit"} <= set(about)
        assert about["device"].startswith("NVIDIA")


def test_the_reference_holds_everything_on_the_gpu():
    (report,) = (json.loads(path.read_text()) for path in REPORTS if path.stem == "reference")
    assert report["passed"]
    assert {finding["verdict"] for finding in report["findings"]} == {"holds"}


def test_three_kernels_of_others_or_more_were_judged_and_the_wrap_of_fa3_was_found():
    others = {path.stem: json.loads(path.read_text()) for path in REPORTS if path.stem != "reference"}
    assert len(others) >= 3
    assert all(any(finding["verdict"] == "holds" for finding in report["findings"]) for report in others.values())
    (far,) = (finding for finding in others["flashinfer_fa3"]["findings"] if finding["name"] == "far pages")
    assert far["verdict"] == "fails"
