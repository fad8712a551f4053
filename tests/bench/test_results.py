"""The record: one layout, whole after every case, and nothing in it that JSON has no word for."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mla.bench.cases import BenchCase
from mla.bench.floors import Ceilings
from mla.bench.results import FORMAT, VERDICTS, Results, Row, beside_best_peer

CEILINGS = Ceilings(4000.0, 4100.123456, 700.0, 3.5)
CASE = BenchCase("ragged", (5, 900, 17), heads=16)


def record(*rows: Row) -> Results:
    about = {"mla": "0.1.0", "device": "a GPU", "date": "2026-01-01 00:00 UTC"}
    timed = beside_best_peer([row.timed(CASE, CEILINGS) for row in rows])
    kinds = {row.contender: {"kind": row.kind, "version": ""} for row in rows}
    return Results(about, {"seed": 0}, kinds, ["flashmla"], False, CEILINGS, [CASE], timed)


ROWS = (
    Row("ragged", "peer", "peer", "near", within_budget=False, relative_error=1.23456789e-2, eager_us=40, graph_us=20),
    Row("ragged", "ours", "backend", "right", within_budget=True, relative_error=2e-3, eager_us=30.0, graph_us=None),
    Row("ragged", "bad", "backend", "wrong", "not finite", within_budget=False),
)


def test_the_layout_is_the_documented_one() -> None:
    whole = json.loads(record(*ROWS).as_json())
    assert list(whole) == [
        "format", "about", "scaled", "settings", "ceilings", "contenders", "absent", "cases", "rows",
    ]  # fmt: skip
    assert whole["format"] == FORMAT
    assert whole["ceilings"] == {
        "copy_gbs": 4000.0,
        "read_gbs": 4100.1,
        "bf16_tflops": 700.0,
        "empty_graph_us": 3.5,
    }
    case = whole["cases"]["ragged"]
    assert case["lengths"] == [5, 900, 17]
    assert {name: case[name] for name in ("batch", "heads", "q_len", "longest", "page_size", "dtype", "top_k")} == {
        "batch": 3, "heads": 16, "q_len": 1, "longest": 900, "page_size": 64, "dtype": "bf16", "top_k": 0,
    }  # fmt: skip
    assert {"ragged", "sweep", "axis_value", "scaled", "flops", "bytes", "floor_us"} < set(case)
    assert [list(row) for row in whole["rows"]] == [[one.name for one in fields(Row)]] * 3
    assert {row["verdict"] for row in whole["rows"]} <= set(VERDICTS)


def test_what_follows_from_the_times() -> None:
    peer, ours, bad = record(*ROWS).rows
    assert (peer.best_us, ours.best_us, bad.best_us) == (20, 30.0, None)
    assert (peer.ratio_to_best_peer, ours.ratio_to_best_peer, bad.ratio_to_best_peer) == (1, 1.5, None)
    assert bad.floor_us == ours.floor_us is not None
    assert ours.ratio_to_floor == 30.0 / ours.floor_us
    assert bad.ratio_to_floor is None


def test_two_writings_are_the_same_text_and_end_with_a_newline(tmp_path: Path) -> None:
    first = record(*ROWS)
    first.save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert text == record(*ROWS).as_json()
    assert text.endswith("}\n")
    assert '"lengths": [5, 900, 17]' in text  # one line
    assert '"relative_error": 0.012346' in text  # no digits that are noise
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_equal_lengths_are_told_once() -> None:
    results = record()
    results.cases = [BenchCase("even", (70,) * 50, heads=1)]
    case: dict[str, Any] = json.loads(results.as_json())["cases"]["even"]
    assert (case["lengths"], case["batch"], case["ragged"]) == ([70], 50, False)


def test_a_row_is_flat() -> None:
    assert not any(isinstance(value, (dict, list)) for value in asdict(ROWS[0]).values())
