"""Machine code kept on disk, so that a process compiles only what no process before it has compiled.

A file's name is the hash of all that has a hand in its content: the kernels' source, the configuration, the chip, and
the versions of the compilers and the driver. It is written beside and renamed, so that processes that start together
see a whole file or none; its own hash stands in its first line, and a file that does not match it is compiled anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

VARIABLE = "MLA_XQA_CACHE"
"""The environment variable that names the folder; "off" (or "0") keeps nothing."""

_HERE = Path(__file__).parent
_SOURCES = ("isa.py", "numba_names.py", "config.py", "specialize.py", "compiler.py", "plan.py", "kernel/*.py")
_MAGIC = b"mla-xqa-1 "


def folder() -> Path | None:
    """Where files are kept, or None when they are not."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() in ("off", "0"):
        return None
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "mla", "xqa")


@cache
def source_hash() -> str:
    """Of every file that says what the kernels are."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_HERE.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key(*parts: object) -> str:
    """The name of what these parts, and the kernels' source, make."""
    return hashlib.sha256("\n".join([source_hash(), *map(repr, parts)]).encode()).hexdigest()[:40]


def read(name: str) -> bytes | None:
    """What was kept under a name; None when there is nothing, or nothing whole."""
    where = folder()
    if where is None:
        return None
    try:
        content = (where / f"{name}.cubin").read_bytes()
    except OSError:
        return None
    head, _, code = content.partition(b"\n")
    return code if head == _MAGIC + hashlib.sha256(code).hexdigest().encode() else None


def write(name: str, code: bytes) -> None:
    """Keep it. A folder that cannot be written to is no error: the next process compiles again."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
            os.replace(temporary, where / f"{name}.cubin")
        except OSError:
            os.unlink(temporary)
            raise
