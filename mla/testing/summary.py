"""Several JSON reports as one page: what holds for which kernel, and every failure with its case.

`python -m mla.testing.summary REPORT.json ... > PAGE.md`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """# Kernels of others before the oracle

Measured, not argued: each column is one published kernel, brought to the call's arguments by a file in `examples/` and
judged by `mla check` within what its makers claim. Written by `python -m mla.testing.summary` from the JSON reports in
`benchmarks/results/oracle/`. What the findings mean is in [the oracle](oracle.md).
"""


def page(reports: list[dict[str, Any]]) -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD,
            _table(reports),
            "",
            "## What failed",
            "",
            *_failures(reports),
            "## Where and when",
            "",
            *_about(reports),
        ]
    )


def _table(reports: list[dict[str, Any]]) -> str:
    names = [_short(report) for report in reports]
    lines = [f"| property | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    rows = zip(*(report["findings"] for report in reports), strict=True)
    lines += [f"| {row[0]['name']} | {' | '.join(_cell(finding) for finding in row)} |" for row in rows]
    return "\n".join(lines)


def _short(report: dict[str, Any]) -> str:
    kernel: str = report["kernel"]
    return (
        kernel.removeprefix("examples.")
        .removesuffix(":decode")
        .replace("mla:trtllm_batch_decode_with_kv_cache_mla", "mla")
    )


def _cell(finding: dict[str, Any]) -> str:
    if finding["verdict"] == "holds":
        return f"holds ({finding['judged']})"
    if finding["verdict"] == "fails":
        return f"**fails {finding['failed']} of {finding['judged']}**"
    return "-"


def _failures(reports: list[dict[str, Any]]) -> list[str]:
    lines = []
    for report in reports:
        for finding in report["findings"]:
            if "failure" in finding:
                failure = finding["failure"]
                lines += [f"**{_short(report)}, {finding['name']}**: {failure['words']}.", ""]
                lines += ["```text", failure["smallest"], *failure["text"].splitlines(), "```", ""]
    return lines


def _about(reports: list[dict[str, Any]]) -> list[str]:
    facts = [", ".join(f"{name} {value}" for name, value in report["about"].items()) for report in reports]
    return [f"* {_short(report)}: {words}" for report, words in zip(reports, facts, strict=True)]


def main(paths: list[str]) -> int:
    """Print the page of the reports in these files."""
    print(page([json.loads(Path(path).read_text()) for path in paths]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
