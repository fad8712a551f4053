"""What `mla bench` prints: a head, a line per row as the cases are done, and a summary."""

from __future__ import annotations

from collections.abc import Sequence

from mla.bench.cases import BenchCase
from mla.bench.floors import work
from mla.bench.results import Results, Row
from mla.cli.tables import Table

COLUMNS = (
    ("case", 25), ("contender", 13), ("eager us", 10), ("graph us", 10), ("host us", 8), ("TFLOP/s", 8), ("GB/s", 7),
    ("x floor", 8), ("x best peer", 12), ("rel. error", 11),
)  # fmt: skip
TEXT = 2  # so many columns hold words, and the others numbers


def head(results: Results) -> str:
    """Where and how, the ceilings, who is absent, and the titles of the columns."""
    ceilings, about = results.ceilings, results.about
    versions = ", ".join(f"{name} {about[name]}" for name in ("mla", "torch", "triton") if name in about)
    told = [
        f"{about['device']}, {versions}; medians of {results.settings['repetitions']}, microseconds",
        f"ceilings: copy {ceilings.copy_gbs:.4g} GB/s, read {ceilings.read_gbs:.4g} GB/s",
    ]
    told[-1] += f", bf16 {ceilings.bf16_tflops:.4g} TFLOP/s"
    if ceilings.empty_graph_us is not None:
        told[-1] += f", a graph of one tiny kernel {ceilings.empty_graph_us:.3g} us"
    if results.absent:
        told.append(f"peers that are not installed: {', '.join(results.absent)}")
    if results.scaled:
        told.append("The cases are scaled down to fit a CPU: no number here says anything about speed.")
    return "\n".join([*told, "", _line([name for name, _ in COLUMNS])])


def lines(rows: Sequence[Row]) -> str:
    """The rows of one case."""
    return "\n".join(map(_row, rows))


def _row(row: Row) -> str:
    if row.best_us is None:
        word = "-" if row.verdict == "unable" else row.verdict
        return f"{_line([row.case, row.contender])} {word:>10}  {row.reason}"
    cells = [row.case, row.contender]
    cells += [_number(value, ".1f") for value in (row.eager_us, row.graph_us, row.host_us)]
    cells += [_number(value, ".3g" if value is None or value < 1000 else ".0f") for value in (row.tflops, row.gbs)]
    cells += [_number(row.ratio_to_floor, ".2f"), _number(row.ratio_to_best_peer, ".2f")]
    cells.append(_number(row.relative_error, ".1e"))
    notes = [row.way, "outside the budget" if row.verdict == "near" else ""]
    return "  ".join([_line(cells), *filter(None, notes)])


def _line(cells: Sequence[str]) -> str:
    padded = [
        cell.ljust(width) if place < TEXT else cell.rjust(width)
        for place, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=False))
    ]
    return " ".join(padded)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary(results: Results) -> Table:
    """Case by case: the floor, and the best backend next to the best peer."""
    table = []
    for case in results.cases:
        rows = [row for row in results.rows if row.case == case.name]
        ours, theirs = (_best(rows, kinds) for kinds in (("backend", "own"), ("peer",)))
        floor = next((row.floor_us for row in rows if row.floor_us is not None), None)
        ratio = None if ours is None or theirs is None else _time(ours) / _time(theirs)
        table.append((case.name, _number(floor, ".1f"), *_named(ours), *_named(theirs), _number(ratio, ".2f")))
    columns = ("case", "floor us", "best backend", "us", "best peer", "us", "backend / peer")
    return Table("Summary", columns, table)


def _best(rows: Sequence[Row], kinds: Sequence[str]) -> Row | None:
    return min((row for row in rows if row.kind in kinds and row.best_us is not None), key=_time, default=None)


def _time(row: Row) -> float:
    assert row.best_us is not None
    return row.best_us


def _named(row: Row | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (row.contender, _number(row.best_us, ".1f"))


def failed(results: Results) -> bool:
    """Whether a backend was wrong or raised."""
    return any(row.kind == "backend" and row.verdict in ("wrong", "failed") for row in results.rows)


def case_table(cases: Sequence[BenchCase]) -> Table:
    """The named cases with the work that they need."""
    rows = []
    for case in cases:
        needed = work(case)
        length = f"{min(case.lengths)}..{case.longest}" if case.ragged else str(case.longest)
        sizes = (case.batch, case.heads, case.q_len, length, case.dtype, case.top_k or "-")
        work_cells = (f"{needed.flops / 1e9:.1f}", f"{needed.bytes / 1e6:.1f}", f"{needed.intensity:.0f}")
        rows.append((case.name, *map(str, sizes), *work_cells))
    columns = ("case", "B", "H", "Q", "length", "dtype", "top-k", "GFLOP", "MB", "FLOP/byte")
    return Table("Named cases (pages of 64)", columns, rows)
