"""The pictures themselves. Imported by `pictures` once matplotlib is known to be there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mla.bench.floors import MATMUL_SPEEDUP
from mla.bench.pictures import DPI, Record

GREY = "0.45"


def roofline(record: Record, path: Path) -> Path:
    """FLOPs per byte against TFLOP/s under the two ceilings: one marker per case and contender."""
    figure, axes = _paper("Needed work over time, under the measured ceilings", record, (8.0, 5.2))
    rows = [row for row in record.rows.values() if not record.cases[row["case"]]["sweep"]]
    intensities = {row["flops"] / row["bytes"] for row in rows}
    low, high = min(intensities) / 2, max(intensities) * 2
    reach = max(record.ceilings["copy_gbs"], record.ceilings["read_gbs"]) / 1e3  # TB/s
    for factor in sorted({MATMUL_SPEEDUP[record.cases[row["case"]]["dtype"]] for row in rows}):
        peak = record.ceilings["bf16_tflops"] * factor
        corner = peak / reach
        xs = sorted({low, *({corner} if low < corner < high else set()), high})
        axes.plot(xs, [min(peak, x * reach) for x in xs], color=GREY, linestyle="-" if factor == 1 else "--")
        words = f"{peak:.0f} TFLOP/s" + ("" if factor == 1 else " in fp8")
        axes.annotate(words, (high, min(peak, high * reach)), xytext=(-4, 4), textcoords="offset points", ha="right")
    axes.annotate(f"{1e3 * reach:.4g} GB/s", (low, low * reach), xytext=(0, 32), textcoords="offset points", color=GREY)
    for name in _present(record, {row["case"] for row in rows}):
        own = [row for row in rows if row["contender"] == name]
        axes.plot(
            [row["flops"] / row["bytes"] for row in own],
            [row["tflops"] for row in own],
            color=record.colour(name),
            marker=record.marker(name),
            linestyle="none",
            markersize=5,
            alpha=0.8,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte that the case needs", ylabel="TFLOP/s")
    return _save(figure, path)


def bars(record: Record, path: Path) -> Path:
    """Every time over the floor of its case, in groups of bars."""
    names = [name for name, case in record.cases.items() if not case["sweep"] and _timed(record, name)]
    present = _present(record, names)
    count, height = len(present), 0.8 / len(present)
    figure, axes = _paper("Time over the floor (1 is what no kernel can pass)", record, (8.0, 1.6 + 0.42 * len(names)))
    for place, contender in enumerate(present):
        found = [
            (at, record.rows[name, contender]) for at, name in enumerate(names) if (name, contender) in record.rows
        ]
        axes.barh(
            [at + (place - (count - 1) / 2) * height for at, _ in found],
            [row["ratio_to_floor"] for _, row in found],
            height,
            color=record.colour(contender),
            label=contender,
        )
    axes.axvline(1.0, color=GREY)
    axes.set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    axes.set_xlim(left=0.9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in (2, 3, 5, 20, 50) else ""))
    axes.tick_params(axis="both", which="both", labelsize=8)
    return _save(figure, path)


def sweep(record: Record, axis: str, path: Path) -> Path:
    """Time against size, with the floor, and the line on which the quickest time of the largest size would lie if all
    cost were proportional to the work."""
    cases = {name: case for name, case in record.cases.items() if case["sweep"] == axis}
    figure, axes = _paper(f"Time against {axis}: {_fixed(next(iter(cases.values())), axis)}", record, (8.0, 5.2))
    ordered = sorted(cases, key=lambda name: cases[name]["axis_value"])
    sizes = [cases[name]["axis_value"] for name in ordered]
    floors = [cases[name]["floor_us"] for name in ordered]
    axes.plot(sizes, floors, color=GREY, label="floor")
    last = [row["best_us"] for (name, _), row in record.rows.items() if name == ordered[-1]]
    if last:
        slope = min(last) / floors[-1]
        axes.plot(sizes, [slope * floor for floor in floors], color=GREY, linestyle=":", label="proportional to work")
    empty = record.ceilings["empty_graph_us"]
    if empty is not None:
        axes.axhline(empty, color=GREY, linestyle="--", linewidth=0.8, label="a graph of one tiny kernel")
    for contender in _present(record, cases):
        found = [(size, record.rows.get((name, contender))) for size, name in zip(sizes, ordered, strict=True)]
        points = [(size, row["best_us"]) for size, row in found if row is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(
                xs,
                ys,
                color=record.colour(contender),
                marker=record.marker(contender),
                markersize=4.5,
                linewidth=1.4,
                label=contender,
            )
    axes.set(yscale="log", xlabel=axis, ylabel="microseconds")
    if axis == "q_len":
        axes.set_xticks(sizes)
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [_binary(size) for size in sizes])
    return _save(figure, path)


def _timed(record: Record, case: str) -> bool:
    return any(name == case for name, _ in record.rows)


def _present(record: Record, cases: Collection[str]) -> list[str]:
    """The contenders that were timed on one of these cases."""
    found = {contender for case, contender in record.rows if case in cases}
    return [name for name in record.contenders if name in found]


def _fixed(case: dict[str, Any], axis: str) -> str:
    words = {"batch": "B", "heads": "H", "q_len": "Q", "longest": "length"}
    kept = {word: case[key] for key, word in words.items() if key != {"length": "longest"}.get(axis, axis)}
    sparse = f", top {case['top_k']}" if case["top_k"] else ""
    return ", ".join(f"{word} = {value}" for word, value in kept.items()) + f", {case['dtype']}{sparse}"


def _binary(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else str(size)


def _paper(title: str, record: Record, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(record.caption, fontsize=7, color=GREY)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": None})
    return path
