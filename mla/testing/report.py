"""A report as text for people, JSON for programs, and one HTML page for both."""

from __future__ import annotations

import dataclasses
import html
import json
import textwrap
from typing import Any

from mla.testing.suite import WORDS, Finding, Report

SIGNS = {"holds": "ok  ", "fails": "FAIL", "not claimed": "-   ", "not judged here": "-   "}


def line(finding: Finding) -> str:
    """One finding in one line."""
    count = f"{finding.judged} cases" if finding.verdict == "holds" else finding.verdict
    if finding.verdict == "fails" and finding.judged:
        count = f"fails {finding.failed} of {finding.judged} cases"
    return f"{SIGNS[finding.verdict]} {finding.name}: {finding.sentence} ({count}, {finding.seconds:.1f} s)"


def details(finding: Finding) -> str:
    """What failed and how, for a finding that fails."""
    failure = finding.failure
    if failure is None:
        return ""
    smallest = "" if failure.smallest == failure.case else f"\nfirst failing case: {failure.case!r}"
    words = WORDS.get(failure.kind, failure.kind)
    body = f"{words}\nsmallest failing case: {failure.smallest!r}{smallest}\n{failure.text}"
    return textwrap.indent(body, "       ")


def summary(report: Report) -> str:
    """The last words: how many properties hold, fail, and were not judged; and the kinds of failure."""
    verdicts = [finding.verdict for finding in report.findings]
    kinds = sorted({f.failure.kind for f in report.findings if f.failure is not None})
    held, failed = verdicts.count("holds"), verdicts.count("fails")
    rest = len(verdicts) - held - failed
    text = f"{report.kernel} on {report.device}: {held} properties hold, {failed} fail, {rest} not judged"
    return text + "".join(f"\n  {kind}: {WORDS.get(kind, kind)}" for kind in kinds)


def as_text(report: Report) -> str:
    """The whole report."""
    parts = [part for finding in report.findings for part in (line(finding), details(finding)) if part]
    return "\n".join([*parts, "", summary(report)])


def as_json(report: Report) -> str:
    """The whole report, cases as constructor calls."""
    findings = []
    for finding in report.findings:
        row: dict[str, Any] = {
            field.name: getattr(finding, field.name) for field in dataclasses.fields(finding) if field.name != "failure"
        }
        row["seconds"] = round(finding.seconds, 2)
        if finding.failure is not None:
            failure = finding.failure
            row["failure"] = {
                "kind": failure.kind,
                "words": WORDS.get(failure.kind, failure.kind),
                "case": repr(failure.case),
                "smallest": repr(failure.smallest),
                "text": failure.text,
            }
        findings.append(row)
    whole = {
        "kernel": report.kernel,
        "device": report.device,
        "passed": report.passed,
        "about": report.about,
        "profile": dataclasses.asdict(report.profile),
        "findings": findings,
    }
    return json.dumps(whole, indent=2) + "\n"


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #8884; }}
.holds {{ color: #1a7f37; }} .fails {{ color: #cf222e; font-weight: 600; }} .other {{ color: #888; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #8882; padding: .6rem; border-radius: .3rem; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<p>{about}</p>
<table><thead><tr><th>property<th>verdict<th>cases<th>what holds</tr></thead><tbody>
{rows}
</tbody></table>
</html>
"""


def as_html(report: Report) -> str:
    """The whole report as one page that needs nothing else."""
    rows = []
    for finding in report.findings:
        look = finding.verdict if finding.verdict in ("holds", "fails") else "other"
        found = f"<pre>{html.escape(textwrap.dedent(details(finding)))}</pre>" if finding.failure else ""
        count = f"{finding.failed} of {finding.judged} fail" if finding.failed else str(finding.judged)
        rows.append(
            f'<tr><td>{html.escape(finding.name)}<td class="{look}">{html.escape(finding.verdict)}'
            f"<td>{count}<td>{html.escape(finding.sentence)}{found}</tr>"
        )
    about = ", ".join(f"{html.escape(key)} {html.escape(value)}" for key, value in report.about.items())
    title = html.escape(f"{report.kernel} on {report.device}")
    return PAGE.format(
        title=title, summary=html.escape(summary(report)).replace("\n", "<br>"), about=about, rows="\n".join(rows)
    )
