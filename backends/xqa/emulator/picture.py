"""Fragments drawn as text: which lane holds what, and in which register."""

from __future__ import annotations

import numpy as np

from mla.backends.xqa.emulator.formats import Array


def owners(fragment: str) -> list[list[str]]:
    """ "lane:register" of each cell of a fragment.

    Args:
        fragment: "A" (16 rows x 8 words of 4 bytes), "B" (8 words x 8 columns) or "C" (16 rows x 8 columns of fp32).
    """
    if fragment == "A":
        return [[f"{row % 8 * 4 + word % 4}:a{row // 8 + word // 4 * 2}" for word in range(8)] for row in range(16)]
    if fragment == "B":
        return [[f"{column * 4 + word % 4}:b{word // 4}" for column in range(8)] for word in range(8)]
    if fragment == "C":
        return [
            [f"{(row % 8) * 4 + column // 2}:c{column % 2 + 2 * (row // 8)}" for column in range(8)]
            for row in range(16)
        ]
    raise ValueError(f'fragment is {fragment!r}; expected "A", "B" or "C"')


def draw(fragment: str) -> str:
    """The owners as a table: `print(draw("A"))`."""
    cells = owners(fragment)
    width = max(len(cell) for row in cells for cell in row)
    across = "column" if fragment != "A" else "word"
    down = "word" if fragment == "B" else "row"
    head = f"{down:>4} \\ {across:6}" + " ".join(f"{i:>{width}}" for i in range(len(cells[0])))
    lines = [f"{i:>4}         " + " ".join(f"{cell:>{width}}" for cell in row) for i, row in enumerate(cells)]
    return "\n".join([head, *lines])


def lanes(values: Array, digits: int = 3) -> str:
    """One register of a warp, [32], as 8 rows (g) of 4 lanes (t)."""
    grid = np.asarray(values).reshape(8, 4)
    form = f".{digits}g" if grid.dtype.kind == "f" else "#010x"
    texts = [[format(value, form) for value in row] for row in grid.tolist()]
    width = max(len(text) for row in texts for text in row)
    return "\n".join(f"g={g}  " + "  ".join(f"{text:>{width}}" for text in row) for g, row in enumerate(texts))
