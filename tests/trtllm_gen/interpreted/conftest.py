"""Everything in this folder runs on Triton's interpreter, repaired."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("run these with TRITON_INTERPRET=1 in the environment, or run test_interpreted.py")

from mla.backends.trtllm_gen.interpreter import repair

repair()
