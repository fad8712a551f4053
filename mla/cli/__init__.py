"""The command line: `mla env`, `mla backends`, `mla check`, `mla demo`, `mla bench`.

`import mla` never loads this. A command's own imports happen when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mla import __version__
from mla.cli import backends, bench, check, demo, env
from mla.cli.tables import UsageError

COMMANDS = {"env": env, "backends": backends, "check": check, "demo": demo, "bench": bench}


def parser() -> argparse.ArgumentParser:
    """The whole command line, as data."""
    top = argparse.ArgumentParser(
        prog="mla", description="MLA decode attention: what is here, where it runs, and a demo."
    )
    top.add_argument("--version", action="version", version=f"mla {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run, own_parser=command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. Bad usage ends with status 2 and a message on stderr."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        arguments.own_parser.error(str(error))
    except BrokenPipeError:  # `mla backends | head`: the reader has gone, and flushing at exit must not complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
