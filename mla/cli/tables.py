"""Tables for people (plain or rich) and for documents (Markdown)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec


class UsageError(Exception):
    """The command cannot be done as it was asked for; the message says why."""


@dataclass(frozen=True)
class Table:
    """A title, column names, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def add_style_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--style",
        choices=("auto", "plain", "rich"),
        default="auto",
        help="auto: rich tables on a terminal if the package rich is installed, plain text otherwise",
    )


def show(tables: Sequence[Table], style: str = "auto") -> None:
    """Print tables to stdout.

    Raises:
        UsageError: style is "rich" and the package rich is not installed.
    """
    installed = find_spec("rich") is not None
    if style == "rich" and not installed:
        raise UsageError("--style rich needs the package rich, which is not installed; --style plain needs nothing")
    if style == "rich" or (style == "auto" and installed and sys.stdout.isatty()):
        _show_rich(tables)
    else:
        print("\n\n".join(map(plain, tables)))


def plain(table: Table) -> str:
    """Aligned text; the last column is as wide as it likes."""
    lines = [table.columns, tuple("-" * len(name) for name in table.columns), *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([table.title, *text])


def markdown(table: Table) -> str:
    """A Markdown table without the title."""
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _show_rich(tables: Sequence[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        drawn = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
        for column in table.columns:
            drawn.add_column(column, overflow="fold")
        for row in table.rows:
            drawn.add_row(*map(Text, row))  # Text: a "[" in a message is no markup
        console.print(drawn)
