"""Machine code on disk: whole files or none, whoever writes at the same time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla.backends.xqa import disk_cache
from mla.backends.xqa.config import Config


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_was_written_is_read(folder):
    assert disk_cache.read("a") is None
    disk_cache.write("a", b"\x7fELF\n\0code")
    assert disk_cache.read("a") == b"\x7fELF\n\0code"
    assert [path.name for path in folder.iterdir()] == ["a.cubin"]


@pytest.mark.parametrize("damage", [b"", b"mla", b"\0" * 500], ids=["empty", "short", "zeros"])
def test_a_damaged_file_is_as_good_as_none(folder, damage):
    disk_cache.write("a", b"code")
    (folder / "a.cubin").write_bytes(damage)
    assert disk_cache.read("a") is None
    disk_cache.write("a", b"code")
    assert disk_cache.read("a") == b"code"


def test_a_truncated_file_is_as_good_as_none(folder):
    disk_cache.write("a", b"code" * 100)
    whole = (folder / "a.cubin").read_bytes()
    (folder / "a.cubin").write_bytes(whole[:-1])
    assert disk_cache.read("a") is None


def test_many_writers_leave_one_whole_file(folder):
    code = os.urandom(1 << 16)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: disk_cache.write("a", code), range(40)))
    assert disk_cache.read("a") == code
    assert [path.name for path in folder.iterdir()] == ["a.cubin"]


@pytest.mark.parametrize("word", ["off", "OFF", "0"])
def test_it_can_be_turned_off(monkeypatch, word):
    monkeypatch.setenv(disk_cache.VARIABLE, word)
    assert disk_cache.folder() is None
    disk_cache.write("a", b"code")
    assert disk_cache.read("a") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file"))
    disk_cache.write("a", b"code")
    assert disk_cache.read("a") is None


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def refuse(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", refuse)
    disk_cache.write("a", b"code")
    assert list(folder.iterdir()) == []


def test_it_lies_in_the_users_cache_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / "mla" / "xqa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.folder() == Path.home() / ".cache" / "mla" / "xqa"


def test_the_key_is_of_everything_that_has_a_hand_in_it(monkeypatch):
    parts = ("decode", Config(), (9, 0), 13000, ("numba 0.61",))
    keys = {disk_cache.key(*parts)}
    others = ("merge", Config(stages=3), (12, 0), 13010, ("numba 0.62",))
    keys |= {disk_cache.key(*parts[:i], other, *parts[i + 1 :]) for i, other in enumerate(others)}
    monkeypatch.setattr(disk_cache, "source_hash", lambda: "another")
    keys.add(disk_cache.key(*parts))
    assert len(keys) == 7


def test_the_source_hash_covers_every_kernel():
    found = {path.name for pattern in disk_cache._SOURCES for path in disk_cache._HERE.glob(pattern)}
    assert {"decode.py", "attend.py", "memory.py", "merge.py", "schedule.py", "numbers.py", "isa.py"} <= found
    assert all(list(disk_cache._HERE.glob(pattern)) for pattern in disk_cache._SOURCES)
