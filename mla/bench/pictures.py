"""Saved runs, drawn: the roofline, every time over its floor, and sweeps. matplotlib is imported only when it draws."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
DPI = 110
NO_MATPLOTLIB = 'pictures need matplotlib, which is not installed (pip install "mla[demo]" brings it)'


class NoPicture(Exception):
    """A picture cannot be drawn; the message says why."""


@dataclass(frozen=True)
class Record:
    """Runs put together: of two rows for the same contender and case the later file's counts.

    Attributes:
        cases: name -> description. rows: (case, contender) -> row, the timed ones alone.
        ceilings: of the last file. caption: what was measured on what.
    """

    cases: dict[str, dict[str, Any]]
    rows: dict[tuple[str, str], dict[str, Any]]
    ceilings: dict[str, Any]
    caption: str

    @property
    def contenders(self) -> list[str]:
        """Those with a time, backends first."""
        kinds = {row["contender"]: row["kind"] for row in self.rows.values()}
        return sorted(kinds, key=lambda name: (kinds[name] != "backend", name))

    def colour(self, contender: str) -> str:
        return COLOURS[self.contenders.index(contender) % len(COLOURS)]

    def marker(self, contender: str) -> str:
        return MARKERS[self.contenders.index(contender) % len(MARKERS)]


def read(paths: Sequence[str | os.PathLike[str]]) -> Record:
    """The runs in these files.

    Raises:
        NoPicture: a file is no record of a run, or nothing in it was timed.
    """
    cases: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    ceilings: dict[str, Any] = {}
    captions: list[str] = []
    for path in paths:
        try:
            whole = json.loads(Path(path).read_text())
            cases |= whole["cases"]
            rows |= {(row["case"], row["contender"]): row for row in whole["rows"] if row["best_us"] is not None}
            ceilings = whole["ceilings"]
            captions.append(_caption(whole["about"], whole["scaled"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoPicture(f"{os.fspath(path)} is no record of a run ({type(error).__name__}: {error})") from error
    if not rows:
        raise NoPicture("nothing was timed in these runs")
    return Record(cases, rows, ceilings, "\n".join(dict.fromkeys(captions)))


def _caption(about: dict[str, str], scaled: bool) -> str:
    versions = [f"{name} {about[name]}" for name in ("mla", "torch", "triton", "numba-cuda") if name in about]
    words = [about["device"], *versions, *([f"commit {about['commit']}"] if "commit" in about else []), about["date"]]
    return ", ".join(words) + (". Cases scaled down: no measure of speed" if scaled else "")


def draw(record: Record, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every picture that the record has the rows for; return their paths.

    Raises:
        NoPicture: matplotlib is not installed.
    """
    try:
        import matplotlib  # the package first: a blocked one must not be passed by through a submodule
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise NoPicture(NO_MATPLOTLIB) from error
    from mla.bench import drawing

    made = []
    for axis in dict.fromkeys(case["sweep"] for case in record.cases.values()):
        if axis:
            made.append(drawing.sweep(record, axis, Path(folder, f"sweep_{axis}.png")))
        else:
            made.append(drawing.roofline(record, Path(folder, "roofline.png")))
            made.append(drawing.bars(record, Path(folder, "floors.png")))
    return made
