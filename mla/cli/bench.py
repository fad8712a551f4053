"""Time backends and published kernels on the same decode work, in one run, every output judged first.

Without arguments: every named case, every backend that has kernels, every peer that is installed. A case of one's own
is described by --batch, --heads, --q-len, --length, --page-size, --dtype and --top-k; with --sweep these say what stays
fixed. Ends with status 1 if a backend is wrong or fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mla.cli.demo import writable
from mla.cli.problems import not_negative, positive
from mla.cli.tables import Table, UsageError, add_style_argument, show

if TYPE_CHECKING:
    import torch

    from mla.bench.cases import BenchCase
    from mla.bench.contenders import Contender
    from mla.bench.results import Results

SWEEP_BASES = {"length": (32, 4096), "batch": (1, 4096), "q_len": (64, 8192)}
"""Batch and length that a sweep has when nobody says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is timed")
    what.add_argument("--list", action="store_true", help="show the named cases and the peers, and run nothing")
    what.add_argument("--cases", type=_words, metavar="A,B", help="named cases alone; * and ? are understood")
    what.add_argument("--sweep", choices=tuple(SWEEP_BASES), help="1k to 128k tokens, 1 to 1024 requests, or Q 1 to 8")
    what.add_argument("--batch", type=positive, metavar="B", help="requests")
    what.add_argument("--heads", type=positive, metavar="H", help="query heads (default: 128)")
    what.add_argument("--q-len", type=positive, metavar="Q", help="query tokens per request (default: 1)")
    what.add_argument("--length", type=_lengths, metavar="N", help="KV length, or one per request: 100,2000,30")
    what.add_argument("--ragged", action="store_true", help="draw lengths between an eighth of the one given and it")
    what.add_argument("--page-size", type=positive, metavar="P", help="tokens per page (default: 64)")
    what.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), help="of query and cache (default: bf16)")
    what.add_argument("--top-k", type=not_negative, metavar="K", help="sparse top-k (default: 0, dense)")
    who = parser.add_argument_group("who takes part")
    who.add_argument("--backends", type=_words, metavar="A,B", help="backends by name, or none")
    who.add_argument(
        "--peers", type=_words, metavar="A,B", help="peers by name, all, or none (default: those installed)"
    )
    who.add_argument("--contender", action="append", default=[], metavar="MODULE:ATTR", help="a function like the call")
    how = parser.add_argument_group("how")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    how.add_argument("--quick", action="store_true", help="cut the cases down to fit a CPU: shows that all works")
    how.add_argument("--repetitions", type=positive, metavar="N", help="of which the median is taken (default: 50)")
    how.add_argument(
        "--flush", choices=("write", "read"), default="write",
        help="how L2 is filled with other data; written data costs time on its way out (default: %(default)s)",
    )  # fmt: skip
    how.add_argument("--max-seq-len", type=positive, metavar="N", help="pass this bound (default: the longest length)")
    how.add_argument("--workspace-mib", type=not_negative, default=256, metavar="N", help="default: %(default)s")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (default: %(default)s)")
    told = parser.add_argument_group("what is kept")
    told.add_argument("--json", type=writable, metavar="FILE", help="write the record, again after every case")
    told.add_argument("--plot", nargs="+", metavar="FILE", help="draw these records, and run nothing")
    told.add_argument("--to", type=_folder, default=".", metavar="DIR", help="where pictures go (default: here)")
    add_style_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        return _plot(arguments)
    if arguments.list:
        return _list(arguments)
    import torch

    from mla.bench.results import Results
    from mla.bench.run import Bench, DeviceLost, Plan
    from mla.cli import bench_report as report
    from mla.progress import progress
    from mla.testing.about import about

    name = _device(arguments.device)
    device = torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    try:
        cases, (contenders, absent) = _cases(arguments), _contenders(arguments, device)
        _check_bound(cases, arguments.max_seq_len)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise UsageError(str(error)) from error
    repetitions = arguments.repetitions or (3 if arguments.quick else 50)
    clean = arguments.flush == "read"
    plan = Plan(cases, contenders, device, repetitions, arguments.seed, arguments.max_seq_len, clean)
    lost = ""
    # Under a bar rich takes the place of sys.stdout and writes to the terminal: right, unless stdout is a file or pipe.
    stdout = None if sys.stdout.isatty() else sys.stdout
    with progress(plan.pieces) as advance:
        bench = Bench(plan, advance)
        results = Results(
            about=about(name),
            settings={
                "device": name,
                "repetitions": repetitions,
                "flush_bytes": bench.timer.flush_bytes,
                "flush": arguments.flush,
                "workspace_bytes": arguments.workspace_mib << 20,
                "max_seq_len": arguments.max_seq_len,
                "seed": arguments.seed,
            },
            contenders={one.name: {"kind": one.kind, "version": one.version} for one in contenders},
            absent=absent,
            scaled=arguments.quick,
            ceilings=bench.ceilings,
        )
        print(report.head(results), file=stdout, flush=True)
        try:
            for case, rows in bench:
                results.cases.append(case)
                results.rows += rows
                print(report.lines(rows), file=stdout, flush=True)
                _save(results, arguments.json)
        except DeviceLost as error:
            lost = str(error)
    _save(results, arguments.json)
    print()
    show([report.summary(results)], arguments.style)
    if lost:
        print(f"\n{lost}: nothing could be run after it. Leave it out, or begin after that case.")
    return 1 if lost or report.failed(results) else 0


def _save(results: Results, path: str | None) -> None:
    if path is not None:
        results.save(path)


def _plot(arguments: argparse.Namespace) -> int:
    from mla.bench.pictures import NoPicture, draw, read

    try:
        for path in draw(read(arguments.plot), arguments.to):
            print(path)
    except NoPicture as error:
        raise UsageError(str(error)) from error
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from mla.bench.cases import named_cases
    from mla.bench.peers import PEERS
    from mla.cli import bench_report as report

    there = [
        (one.name, one.title, (one.version() or "yes") if one.module_name() else "not installed")
        for one in PEERS.values()
    ]
    show(
        [report.case_table(list(named_cases().values())), Table("Peers", ("name", "kernel", "installed"), there)],
        arguments.style,
    )
    return 0


def _device(asked: str | None) -> str:
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA GPU")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _cases(arguments: argparse.Namespace) -> list[BenchCase]:
    from mla.bench import cases

    sizes = ("batch", "heads", "q_len", "length", "page_size", "dtype", "top_k")
    described = {name: getattr(arguments, name) for name in sizes if getattr(arguments, name) is not None}
    if arguments.cases is not None and (described or arguments.ragged or arguments.sweep):
        raise ValueError("--cases names whole cases; expected no sizes and no --sweep beside it")
    if arguments.sweep:
        if arguments.ragged or len(described.get("length", (0,))) > 1:
            raise ValueError("--sweep has equal lengths; expected one --length and no --ragged")
        batch, length = SWEEP_BASES[arguments.sweep]
        described = {"batch": batch, "length": (length,)} | described
        chosen = cases.sweep(arguments.sweep, _own(described, False))
    elif described or arguments.ragged:
        chosen = [_own(described, arguments.ragged)]
    else:
        chosen = cases.choose(["*"] if arguments.cases is None else arguments.cases)
    return [cases.scaled_down(case) for case in chosen] if arguments.quick else chosen


def _own(described: dict[str, object], ragged: bool) -> BenchCase:
    from mla.bench.cases import own_case

    lengths = described.pop("length", (4096,))
    assert isinstance(lengths, tuple)
    sizes = {"batch": len(lengths), "heads": 128} | described
    return own_case(lengths, ragged=ragged, **sizes)  # type: ignore[arg-type]


def _contenders(arguments: argparse.Namespace, device: torch.device) -> tuple[list[Contender], list[str]]:
    """Who takes part, and the peers that would if they were installed."""
    from mla.bench import contenders, peers

    size = arguments.workspace_mib << 20
    names = contenders.default_backends(device) if arguments.backends is None else arguments.backends
    invited = peers.choose(arguments.peers if arguments.peers or device.type == "cuda" else ())
    taking_part = [peer.contender() for peer in invited]
    taking_part += [contenders.backend(name, size) for name in names]
    taking_part += [contenders.own(target, size) for target in arguments.contender]
    if not taking_part:
        raise ValueError("nobody takes part: no backend here has kernels for this device, and no peer is installed")
    absent = [name for name, peer in peers.PEERS.items() if peer.module_name() is None]
    return contenders.in_order(taking_part), absent


def _check_bound(cases: list[BenchCase], bound: int | None) -> None:
    longest = max(case.longest for case in cases)
    if bound is not None and bound < longest:
        raise ValueError(f"--max-seq-len is {bound}; the longest request has {longest} tokens")


def _words(text: str) -> list[str]:
    """An argparse type: words between commas; "none" is no word at all."""
    return [] if text == "none" else [word.strip() for word in text.split(",") if word.strip()]


def _lengths(text: str) -> tuple[int, ...]:
    """An argparse type: positive numbers between commas."""
    return tuple(positive(word) for word in text.split(","))


def _folder(text: str) -> str:
    """An argparse type: a folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return text
