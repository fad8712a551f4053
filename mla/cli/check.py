"""Bring a kernel before the oracle: is it right, and if not, what kind of wrong?

TARGET is module:attr, a function with the arguments of mla.trtllm_batch_decode_with_kv_cache_mla. What it claims is the
`profile` beside it, or --profile. Ends with status 1 if it fails anything that it claims.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from mla.cli.demo import writable
from mla.cli.tables import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:attr; the module may lie in the current folder")
    add("--backend", metavar="NAME", help="pass backend=NAME on, and take the profile from what that backend claims")
    add("--profile", metavar="MODULE:ATTR", help="a mla.testing.Profile: what the kernel claims")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where to run it (default: %(default)s)")
    add("--examples", type=int, default=100, metavar="N", help="random problems to draw (default: %(default)s)")
    add("--only", action="append", default=[], metavar="PROPERTY", help="judge this property alone; may be repeated")
    add("--no-shrink", action="store_true", help="leave failing cases as they are")
    add("--json", type=writable, metavar="FILE", help="write the report as JSON")
    add("--html", type=writable, metavar="FILE", help="write the report as one HTML page")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from mla.progress import progress
    from mla.testing import report as reports
    from mla.testing.about import about
    from mla.testing.properties import PROPERTIES
    from mla.testing.shrink import available
    from mla.testing.suite import Report, judge_kernel
    from mla.testing.target import load

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA GPU")
    try:
        function, profile = load(arguments.target, arguments.backend, arguments.profile)
        findings = judge_kernel(
            function,
            profile,
            arguments.device,
            examples=arguments.examples if available() else 0,
            shrinking=not arguments.no_shrink,
            only=tuple(arguments.only),
        )
        name = arguments.target if arguments.backend is None else f"{arguments.target} (backend {arguments.backend})"
        report = Report(name, arguments.device, profile, (), about(arguments.device))
        with progress(len(arguments.only) or len(PROPERTIES) + 1) as advance:
            advance("the first property")
            for finding in findings:
                report = dataclasses.replace(report, findings=(*report.findings, finding))
                if arguments.json is not None:  # after each finding: a kernel may take the process down with it
                    Path(arguments.json).write_text(reports.as_json(report))
                advance(f"{finding.name}: {finding.verdict}")
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise UsageError(f"{arguments.target}: {error}") from error
    print(reports.as_text(report))
    if not available():
        print(
            "hypothesis is not installed: no random problems were drawn and no case was shrunk (the test extra has it)"
        )
    if arguments.html is not None:
        Path(arguments.html).write_text(reports.as_html(report))
    return 0 if report.passed else 1
