"""Triton interprets or compiles, for the life of a process: TRITON_INTERPRET decides which tests are collected here.

Without it, everything but `interpreted/`, which `test_interpreted.py` runs in processes of their own; with it,
`interpreted/` alone.
"""

from __future__ import annotations

import os
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]
else:
    collect_ignore = ["interpreted"]
