"""The picture of the demo: each decoded token's error under its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NO_MATPLOTLIB = 'No picture was saved: matplotlib is not installed (pip install "mla[demo]" brings it).'
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # apart for colour-blind readers too


@dataclass(frozen=True)
class Curve:
    """One configuration's errors.

    Attributes:
        name: for the legend.
        error: [S], relative, one per decoded token.
        budget: the largest that is allowed.
    """

    name: str
    error: torch.Tensor
    budget: float


def save_picture(path: str, title: str, first: int, curves: Sequence[Curve]) -> str:
    """Draw the curves into a PNG file.

    Args:
        path: of the file.
        title: above the axes.
        first: position of the first decoded token.
        curves: one per configuration.

    Returns:
        One sentence: where the picture is, or that there is none and what to install.
    """
    try:
        import matplotlib  # noqa: F401  (the package first: a blocked one must not be passed by through a submodule)
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return NO_MATPLOTLIB
    figure = Figure(figsize=(9.0, 5.0), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, colour in zip(curves, COLOURS, strict=False):
        positions = range(first, first + len(curve.error))
        axes.axhline(curve.budget, color=colour, linestyle="--", linewidth=1.5)
        axes.plot(
            positions, curve.error.tolist(), color=colour, marker="o", markersize=3.5, linewidth=1.5, label=curve.name
        )
        label = f" budget {curve.budget:.2g}"
        beside = axes.get_yaxis_transform()  # x in shares of the width, y in data
        axes.text(1.0, curve.budget, label, transform=beside, color=colour, va="center", fontsize=9)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("position of the decoded token")
    axes.set_ylabel("error against float64,\nrelative to the layer's output")
    axes.grid(True, which="both", axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    budget = Line2D([], [], color="0.35", linestyle="--")
    figure.legend([*handles, budget], [*labels, "budget of each"], loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="png")
    return f"The picture of each token's error is in {path}."
