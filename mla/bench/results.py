"""The record of a run: one row per case and contender, and the JSON file that holds them all.

The layout is fixed, keys stand in one order, and the file is written again after every case: a run that is stopped
keeps what it has.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mla.bench.cases import BenchCase
from mla.bench.floors import Ceilings, floor_us, work

FORMAT = 1
VERDICTS = {
    "right": "within the budget, and timed",
    "near": "a kernel of others outside the budget, right to a few percent, and timed",
    "wrong": "not timed",
    "unable": "the contender does not do such cases, or is not installed",
    "failed": "it raised",
}
"""What may have become of a contender on a case."""


@dataclass(frozen=True)
class Row:
    """One contender on one case. Times are microseconds; None is what was not or cannot be measured.

    Attributes:
        verdict: a key of `VERDICTS`. reason: why it is not "right".
        way: which of the contender's ways was quickest, or "".
        within_budget: whether every judged element kept its budget; None when nothing came out.
        relative_error, error_over_budget: see `mla.bench.gate.Judgement`.
        eager_us, graph_us, host_us: see `mla.bench.timing`. best_us: the better of eager and graph.
        graph_reason: why there is no graph.
        tflops, gbs: the case's needed work over best_us.
        ratio_to_floor: best_us over the floor. ratio_to_best_peer: over that of the quickest peer in this run.
    """

    case: str
    contender: str
    kind: str
    verdict: str
    reason: str = ""
    way: str = ""
    within_budget: bool | None = None
    relative_error: float | None = None
    error_over_budget: float | None = None
    eager_us: float | None = None
    graph_us: float | None = None
    graph_reason: str = ""
    host_us: float | None = None
    best_us: float | None = None
    floor_us: float | None = None
    flops: int | None = None
    bytes: int | None = None
    tflops: float | None = None
    gbs: float | None = None
    ratio_to_floor: float | None = None
    ratio_to_best_peer: float | None = None

    def timed(self, case: BenchCase, ceilings: Ceilings) -> Row:
        """The row with all that follows from its times."""
        needed, floor = work(case), floor_us(case, ceilings)
        row = replace(self, floor_us=floor, flops=needed.flops, bytes=needed.bytes)
        times = [time for time in (self.eager_us, self.graph_us) if time is not None]
        if not times:
            return row
        best = min(times)
        return replace(
            row,
            best_us=best,
            tflops=needed.flops / best / 1e6,
            gbs=needed.bytes / best / 1e3,
            ratio_to_floor=best / floor,
        )


def beside_best_peer(rows: Iterable[Row]) -> list[Row]:
    """The rows of one case, each next to the quickest peer of them."""
    rows = list(rows)
    times = [row.best_us for row in rows if row.kind == "peer" and row.best_us is not None]
    if not times:
        return rows
    best = min(times)
    return [row if row.best_us is None else replace(row, ratio_to_best_peer=row.best_us / best) for row in rows]


@dataclass
class Results:
    """A whole run.

    Attributes:
        about: versions, device, date, commit (`mla.testing.about`).
        settings: how it was run. contenders: name -> kind and version. absent: peers that are not installed.
        scaled: whether the cases were cut down to fit a CPU: then no number says anything about speed.
    """

    about: dict[str, str]
    settings: dict[str, Any]
    contenders: dict[str, dict[str, str]]
    absent: list[str]
    scaled: bool
    ceilings: Ceilings
    cases: list[BenchCase] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> str:
        """The whole as text that ends with a newline; lists of numbers take one line each."""
        whole = {
            "format": FORMAT,
            "about": self.about,
            "scaled": self.scaled,
            "settings": self.settings,
            "ceilings": _rounded(asdict(self.ceilings)),
            "contenders": self.contenders,
            "absent": self.absent,
            "cases": {case.name: describe(case, self.ceilings) for case in self.cases},
            "rows": [_rounded(asdict(row)) for row in self.rows],
        }
        text = json.dumps(whole, indent=1, allow_nan=False)
        return re.sub(r"\[([\s\d,]+)\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, or leave the old one whole."""
        draft = Path(f"{os.fspath(path)}.part")
        draft.write_text(self.as_json())
        draft.replace(path)


def describe(case: BenchCase, ceilings: Ceilings) -> dict[str, Any]:
    """All that is to say about a case."""
    needed = work(case)
    return {
        "batch": case.batch,
        "heads": case.heads,
        "q_len": case.q_len,
        "longest": case.longest,
        "ragged": case.ragged,
        "lengths": list(case.lengths) if case.ragged else [case.longest],  # one for all where they are equal
        "page_size": case.page_size,
        "dtype": case.dtype,
        "top_k": case.top_k,
        "sweep": case.sweep,
        "axis_value": case.axis_value,
        "scaled": case.scaled,
        "flops": needed.flops,
        "bytes": needed.bytes,
        "floor_us": _short(floor_us(case, ceilings)),
    }


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _short(value) if isinstance(value, float) else value for name, value in row.items()}


def _short(number: float) -> float:
    """Five digits: more are noise."""
    return float(f"{number:.5g}")
