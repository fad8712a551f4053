"""Pictures come from records alone, are small, and say what was measured on what."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mla.bench.cases import BenchCase, own_case, sweep
from mla.bench.floors import Ceilings, floor_us
from mla.bench.pictures import NoPicture, draw, read
from mla.bench.results import Results, Row

CEILINGS = Ceilings(4268, 4100, 680, 3.9)


def save(path: Path, cases: list[BenchCase], slowness: float, *names: str, empty: float | None = 3.9) -> Path:
    """A record in which each contender needs so much more than the floor."""
    ceilings = Ceilings(4268, 4100, 680, empty)
    about = {"mla": "0.1.0", "torch": "2.11.0", "device": "NVIDIA H200", "commit": "abc", "date": "2026-01-01"}
    rows = []
    for case in cases:
        for i, name in enumerate(names):
            kind = "peer" if name == "peer" else "backend"
            time = 10 * i + slowness * floor_us(case, ceilings)
            rows.append(Row(case.name, name, kind, "right", eager_us=time).timed(case, ceilings))
        rows.append(Row(case.name, "wrong", "backend", "wrong").timed(case, ceilings))
    Results(about, {}, {}, [], False, ceilings, cases, rows).save(path)
    return path


def test_a_record_of_everything_makes_every_picture_and_they_are_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    named = [BenchCase(f"case_{i}", (1000 * (i + 1),), heads=16 << (i % 4)) for i in range(24)]
    named.append(BenchCase("narrow", (4096,) * 9, heads=128, dtype="fp8"))
    base = own_case((4096,), batch=8, heads=128)
    swept = [case for axis in ("length", "batch", "q_len") for case in sweep(axis, base)]
    made = draw(read([save(tmp_path / "a.json", named + swept, 1.2, "ours", "other", "peer")]), tmp_path)
    assert [path.name for path in made] == [
        "roofline.png", "floors.png", "sweep_length.png", "sweep_batch.png", "sweep_q_len.png",
    ]  # fmt: skip
    for path in made:
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(content) < 150_000


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    swept = sweep("q_len", own_case((4096,), batch=8, heads=128, top_k=64))
    made = draw(read([save(tmp_path / "a.json", swept, 1.2, "ours", empty=None)]), tmp_path)
    assert [path.name for path in made] == ["sweep_q_len.png"]


def test_records_are_put_together_and_the_later_one_counts(tmp_path: Path) -> None:
    cases = [BenchCase("one", (4096,), heads=16), BenchCase("two", (64,), heads=16)]
    first = save(tmp_path / "a.json", cases, 2.0, "ours", "peer")
    second = save(tmp_path / "b.json", cases[:1], 3.0, "ours")
    record = read([first, second])
    assert record.rows["one", "ours"]["ratio_to_floor"] == 3.0
    assert record.rows["two", "ours"]["ratio_to_floor"] == 2.0
    assert record.contenders == ["ours", "peer"]
    assert ("one", "wrong") not in record.rows
    assert record.caption == "NVIDIA H200, mla 0.1.0, torch 2.11.0, commit abc, 2026-01-01"


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"rows": []}')
    with pytest.raises(NoPicture, match=r"broken\.json is no record of a run \(KeyError"):
        read([broken])
    with pytest.raises(NoPicture, match=r"absent\.json is no record"):
        read([tmp_path / "absent.json"])
    with pytest.raises(NoPicture, match="nothing was timed"):
        read([save(tmp_path / "a.json", [BenchCase("one", (4096,), heads=16)], 1.0)])


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read([save(tmp_path / "a.json", [BenchCase("one", (4096,), heads=16)], 1.0, "ours")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoPicture, match="pictures need matplotlib, which is not installed"):
        draw(record, tmp_path)
