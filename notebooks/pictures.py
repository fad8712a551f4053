"""The few kinds of pictures that the notebooks draw, so that a notebook's cells say what is drawn and not how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

BLUE, ORANGE, GREEN, PINK, GREY, WHITE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#d0d0d0", "#ffffff"
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#e69f00", "#56b4e9", "#8c6d31", "#5b5b5b")
PALE = ("#9fc8e6", "#f4b183", "#9fd9c3", "#e8c4d8", "#f3d9a0", "#c9e4f6", "#d9cbb0", "#bdbdbd")
"""Apart for colour-blind readers too; the pale ones carry black text."""

plt.rcParams |= {
    "figure.dpi": 72,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
}


def cells(
    axes: Any,
    colours: Sequence[Sequence[str]],
    texts: Sequence[Sequence[str]] | None = None,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    title: str = "",
    size: float = 8,
) -> None:
    """A table of coloured cells: colours [rows][columns], and what is written in them."""
    high, wide = len(colours), max(map(len, colours), default=0)
    for y, line in enumerate(colours):
        for x, colour in enumerate(line):
            axes.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
            if texts is not None and texts[y][x]:
                axes.text(x + 0.5, y + 0.5, texts[y][x], ha="center", va="center", fontsize=size)
    axes.set(xlim=(0, wide), ylim=(high, 0), title=title)
    axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def bars(axes: Any, values: dict[str, float], *, title: str = "", unit: str = "", log: bool = False) -> None:
    """Horizontal bars, the first on top, each with its number."""
    names, numbers = list(values), list(values.values())
    axes.barh(names, numbers, color=[COLOURS[i % len(COLOURS)] for i in range(len(names))])
    axes.invert_yaxis()
    if log:
        axes.set_xscale("log")
    for y, number in enumerate(numbers):
        axes.text(number, y, f" {number:,.0f} {unit}" if number >= 100 else f" {number:.3g} {unit}", va="center")
    axes.margins(x=0.25)
    axes.set_title(title)
