"""The kill matrix: which property of the suite notices which planted fault, and by how many of its cases.

`python -m mla.testing.faults.matrix FILE` writes it as a page.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import torch

from mla.progress import progress
from mla.testing.case import Case
from mla.testing.faults import FAULTS
from mla.testing.faults.fault import Fault
from mla.testing.judges import Answer, keeping
from mla.testing.properties import PROPERTIES
from mla.testing.suite import outcome

HEAD = """# The kill matrix

Would the suite notice? Every row is a kernel with one planted mistake, every number says how many cases of that
property refuse it, on a CPU. Written by `python -m mla.testing.faults.matrix`; a test holds each row to the code.

| fault | what it does wrong | kills | noticed by |
| --- | --- | ---: | --- |
"""


_answers: dict[Case, Answer] = {}  # a process judges many faults on the same cases


def row(fault: Fault) -> dict[str, int]:
    """Property -> how many of its cases refuse the fault, in the suite's order; only those that do."""
    found = {}
    with keeping(_answers):
        for prop in PROPERTIES:
            if not prop.gpu_only:
                cases = [case for case in prop.cases if fault.concerns(case)]
                found[prop.name] = sum(outcome(prop.judge, fault.make(), case, "cpu") is not None for case in cases)
    return {name: kills for name, kills in found.items() if kills}


def line(fault: Fault, kills: dict[str, int]) -> str:
    """A fault's row of the page."""
    noticed = ", ".join(f"{name} {count}" for name, count in kills.items())
    sentence = fault.sentence.replace("|", "\\|")
    return f"| {fault.family}: {fault.name} | {sentence} | {sum(kills.values())} | {noticed} |"


def page(rows: dict[str, dict[str, int]]) -> str:
    """The whole page, with how many faults are noticed and by how many cases at least."""
    fewest = min(sum(kills.values()) for kills in rows.values())
    caught = sum(bool(kills) for kills in rows.values())
    lines = [line(FAULTS[name], kills) for name, kills in rows.items()]
    tail = f"\n{caught} of {len(rows)} faults are noticed, each by at least {fewest} cases.\n"
    return HEAD + "\n".join(lines) + "\n" + tail


def _row_by_name(name: str) -> tuple[str, dict[str, int]]:
    torch.set_num_threads(1)
    # Fresh memory is filled with NaN, so that what a fault leaves unwritten never looks right by chance.
    torch.use_deterministic_algorithms(True, warn_only=True)
    return name, row(FAULTS[name])


def main(path: str) -> int:
    """Write the page; one worker a core."""
    rows = {}
    with multiprocessing.get_context("spawn").Pool() as pool, progress(len(FAULTS)) as advance:
        for name, kills in pool.imap(_row_by_name, FAULTS):
            advance(name)
            rows[name] = kills
    Path(path).write_text(page(rows))
    print(page(rows).splitlines()[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
