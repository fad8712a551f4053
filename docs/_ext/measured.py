"""The page of measurements: tables and pictures from the records that `mla bench --json` wrote."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from mla import registry
from mla.bench.pictures import draw, read
from mla.cli.tables import Table, markdown

CHIPS = {
    "A100": "sm_80", "A10": "sm_86", "RTX 30": "sm_86", "L40": "sm_89", "L4": "sm_89", "RTX 40": "sm_89",
    "H100": "sm_90", "H200": "sm_90", "GH200": "sm_90", "B200": "sm_100", "GB200": "sm_100", "B300": "sm_103",
    "GB300": "sm_103", "RTX 50": "sm_120", "RTX PRO 6000": "sm_120", "GB10": "sm_121",
}  # fmt: skip
"""Words in a device's name -> its chip."""

TITLES = {
    "roofline.png": "Work over time, under the measured ceilings",
    "floors.png": "Time over the floor of each case",
}


def records(app: Sphinx) -> list[tuple[Path, dict[str, Any]]]:
    """Every saved run, oldest first."""
    folder = Path(app.srcdir).parent / "benchmarks" / "results" / "bench"
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("**/*.json"))]
    return sorted(found, key=lambda one: one[1]["about"]["date"])


def performance(app: Sphinx) -> str:
    """A section per device: what was measured with what, a table, and the pictures."""
    by_device: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path, record in records(app):
        by_device.setdefault(record["about"]["device"], []).append((path, record))
    if not by_device:
        return "There are no measurements in this tree yet: `benchmarks/results/bench` holds no record of a run."
    return "\n\n".join(device_section(app, device, found) for device, found in by_device.items())


def device_section(app: Sphinx, device: str, found: list[tuple[Path, dict[str, Any]]]) -> str:
    together = read([path for path, _ in found])
    ceilings = together.ceilings
    told = [f"## {device}", *(f"* {line}" for line in together.caption.splitlines())]
    told += [f"* {line}" for line in (versions(found),) if line]
    rates = f"{ceilings['copy_gbs']:.4g} GB/s copied, {ceilings['read_gbs']:.4g} GB/s read"
    rates += f", {ceilings['bf16_tflops']:.4g} TFLOP/s in bf16"
    told += ["", f"Ceilings of the last of these runs: {rates}.", ""]
    sweeps = dict.fromkeys(case["sweep"] for case in together.cases.values())
    for sweep in sorted(sweeps, key=lambda sweep: sweep or ""):
        told += [f"### Against {sweep}" if sweep else "### Named cases", "", markdown(times(together, sweep)), ""]
    told += not_timed([record for _, record in found])
    told += ["### Pictures", ""]
    folder = Path(app.doctreedir, "pictures", re.sub(r"\W+", "_", device).strip("_").lower())
    folder.mkdir(parents=True, exist_ok=True)
    for picture in draw(together, folder):
        title = TITLES.get(picture.name, f"Time against {picture.stem.removeprefix('sweep_')}")
        told += [f"![{title}]({os.path.relpath(picture, app.srcdir)})", ""]
    return "\n".join(told)


def versions(found: list[tuple[Path, dict[str, Any]]]) -> str:
    """The published kernels with the versions that they tell."""
    every = {name: facts for _, record in found for name, facts in record["contenders"].items()}
    told = [
        f"{name} {facts['version']}" for name, facts in every.items() if facts["kind"] == "peer" and facts["version"]
    ]
    return f"published kernels: {', '.join(told)}" if told else ""


def not_timed(found: list[dict[str, Any]]) -> list[str]:
    """What was wrong, near or failed, with its reason; a dash in a table is a case that a contender does not do."""
    rows = [row for record in found for row in record["rows"] if row["verdict"] in ("wrong", "failed", "near")]
    lines = [f"* `{row['case']}`, `{row['contender']}`: {row['verdict']}. {row['reason']}" for row in rows]
    return ["### Not right", "", *dict.fromkeys(lines), ""] if lines else []


def times(together: Any, sweep: str | None) -> Table:
    """Microseconds: the floor, then every contender; what was not timed is a dash."""
    cases = {name: facts for name, facts in together.cases.items() if facts["sweep"] == sweep}
    names = [name for name in together.contenders if any((case, name) in together.rows for case in cases)]
    rows = []
    for case, facts in cases.items():
        cells = [together.rows.get((case, name)) for name in names]
        shown = (f"{cell['best_us']:.1f} ({cell['ratio_to_floor']:.2f})" if cell else "-" for cell in cells)
        sizes = (str(facts[name]) for name in ("batch", "heads", "q_len", "longest"))
        kind = facts["dtype"] + (f", top {facts['top_k']}" if facts["top_k"] else "")
        rows.append((f"`{case}`", *sizes, kind, f"{facts['floor_us']:.1f}", *shown))
    columns = ("case", "B", "H", "Q", "longest", "numbers", "floor", *(f"`{name}`" for name in names))
    return Table("", columns, rows)


def chip_of(device: str) -> str | None:
    """The chip of the longest known word in a device's name."""
    words = [word for word in CHIPS if re.search(rf"\b{re.escape(word)}", device)]
    return CHIPS[max(words, key=len)] if words else None


def where_it_ran(app: Sphinx) -> str:
    """Per backend: the GPUs that a record in this tree comes from, and what was only compiled."""
    gpus: dict[str, set[str]] = {}
    for path in (Path(app.srcdir).parent / "benchmarks" / "results").glob("**/*.json"):
        record = json.loads(path.read_text())
        device = record.get("about", {}).get("device", "CPU")
        for name in () if "CPU" in device else ran_in(record):
            gpus.setdefault(name, set()).add(device)
    rows = []
    for name in registry.BUILT_IN:
        ran = {chip_of(device) for device in gpus.get(name, ())}
        table = Path(app.srcdir, f"aot_{name.replace('-', '_')}.md")
        text = table.read_text() if table.is_file() else ""
        compiled = set(re.findall(r"\b(sm_\d+)a?\b", "\n".join(re.findall(r"^\|.*$", text, re.M)))) - ran
        chips = sorted(compiled, key=lambda chip: int(chip[3:]))
        rows.append((f"`{name}`", ", ".join(sorted(gpus.get(name, ()))) or "-", ", ".join(chips) or "-"))
    return markdown(Table("", ("backend", "ran on, with a record here", "compiled ahead of time, not run here"), rows))


def ran_in(record: dict[str, Any]) -> set[str]:
    """The backends that gave a right answer in a record of the bench or of the oracle."""
    judged = re.search(r"\(backend ([\w-]+)\)$", record.get("kernel", ""))
    timed = {
        row["contender"] for row in record.get("rows", ()) if row["kind"] == "backend" and row["verdict"] == "right"
    }
    return timed | ({judged[1]} if judged and record.get("passed") else set())


def setup(app: Sphinx) -> dict[str, bool]:
    return {"parallel_read_safe": True, "parallel_write_safe": True}
