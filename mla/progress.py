"""Progress on stderr: a bar where rich and a terminal are, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str], None]
SECONDS_BETWEEN_LINES = 2.0


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Within the block, call the function that this gives `total` times, each time naming the piece of work to come.

    Plain lines say the share of pieces done, in percent. They appear when the text changes, or after two seconds.
    """
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task, pieces = bar.add_task("starting", total=total), iter(range(total))
                yield lambda text: bar.update(task, completed=next(pieces, total), description=text)
            return
    yield _plain_lines(total)


def _plain_lines(total: int) -> Advance:
    done, last_text, last_time = 0, "", 0.0

    def advance(text: str) -> None:
        nonlocal done, last_text, last_time
        now = time.monotonic()
        if text != last_text or now - last_time >= SECONDS_BETWEEN_LINES:
            print(f"{100 * done // total:3d}%  {text}", file=sys.stderr, flush=True)
            last_text, last_time = text, now
        done += 1

    return advance
