"""Run every notebook from a clean kernel and write its .ipynb next to its .py; `make notebooks` does this.

The .py files (py:percent) are what people edit. The .ipynb files hold the same cells and the outputs of a fresh run.

    python notebooks/pairing.py           all of them
    python notebooks/pairing.py 04 07     those whose names begin so
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LARGEST = 200_000  # bytes of an .ipynb
SECONDS = 300  # for one cell; a notebook takes some ten in all


def sources() -> list[Path]:
    """The .py files of the notebooks, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read(path: Path) -> Any:
    """The notebook in a .py or .ipynb file."""
    import jupytext

    return jupytext.read(path)


def executed(path: Path) -> Any:
    """The notebook of a .py file with the outputs of a run in a fresh kernel of this interpreter.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same from run to run, so that a change shows alone
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "jupytext": {"formats": "ipynb,py:percent", "notebook_metadata_filter": "-all"},
    }
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # what one cell prints comes in pieces, in one run so and in another so
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # the rest would change with every Python
    return notebook


def main(wanted: list[str]) -> None:
    import nbformat

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sources():
        if wanted and not path.name.startswith(tuple(wanted)):
            continue
        start = time.perf_counter()
        text = nbformat.writes(executed(path), version=4) + "\n"
        path.with_suffix(".ipynb").write_text(text)
        print(f"{path.stem}: {time.perf_counter() - start:.1f} s, {len(text) / 1000:.0f} kB", flush=True)
        if len(text) >= LARGEST:
            sys.exit(f"{path.stem}.ipynb has {len(text)} bytes; expected less than {LARGEST}: draw less, or smaller")


if __name__ == "__main__":
    main(sys.argv[1:])
