"""Show which backends there are, and what each says of a typical problem on each device of this machine.

Nothing is run. "refused" means not made for this problem, "broken" means that the backend cannot be loaded or asked.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from mla import registry
from mla.cli.capability_table import capability_table
from mla.cli.devices import Device, find_devices
from mla.cli.problems import DTYPES, not_negative, on_device, positive, typical_problem
from mla.cli.tables import Table, add_style_argument, markdown, show
from mla.dispatch import explain_problem
from mla.errors import BackendPluginWarning
from mla.problem import Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--query-dtype", choices=DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--kv-dtype", choices=DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--heads", type=positive, default=128, metavar="H", help="query heads, default: 128")
    parser.add_argument("--q-len", type=positive, default=1, metavar="Q", help="query tokens per request, default: 1")
    parser.add_argument("--page-size", type=positive, default=64, metavar="P", help="tokens per page, default: 64")
    parser.add_argument("--top-k", type=not_negative, default=0, metavar="K", help="sparse top-k, default: 0, dense")
    parser.add_argument("--sinks", action="store_true", help="with attention sinks")
    parser.add_argument(
        "--markdown", action="store_true", help="print what our own backends claim, as a Markdown table"
    )
    add_style_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.markdown:
        print(markdown(capability_table()))
        return 0
    problem = typical_problem(
        query_dtype=arguments.query_dtype,
        kv_dtype=arguments.kv_dtype,
        heads=arguments.heads,
        q_len=arguments.q_len,
        page_size=arguments.page_size,
        top_k=arguments.top_k,
        sinks=arguments.sinks,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BackendPluginWarning)
        tables = [verdict_table(problem, device) for device in find_devices()]
    show(tables, arguments.style)
    shown = "".join(cell for table in tables for row in table.rows for cell in row)
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        if message not in shown:
            print(f"warning: {message}", file=sys.stderr)
    return 0


def verdict_table(problem: Problem, device: Device) -> Table:
    """Every known backend's verdict on one device."""
    columns = ("backend", "source", "state", "reasons")
    if not device.usable:
        return Table(f"{device.label}: not usable", columns, [("-", "-", "-", device.name)])
    there = on_device(problem, device)
    explanation = explain_problem(there, "auto")
    known = registry.backends()
    rows = [
        (verdict.name, known[verdict.name].source, verdict.state, "; ".join(verdict.reasons) or "-")
        for verdict in explanation.verdicts.values()
    ]
    runs = explanation.backend or "none: the call raises"
    return Table(f"{there.describe()}\nbackend='auto' runs: {runs}", columns, rows)
