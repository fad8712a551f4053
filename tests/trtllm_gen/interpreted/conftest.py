"""Everything in this folder runs on Triton's interpreter, repaired."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("run these with TRITON_INTERPRET=1 in the environment, or run test_interpreted.py")

from mla.backends.trtllm_gen.interpreter import repair

repair()


@pytest.fixture
def decode() -> Callable[..., Any]:
    """The call on the interpreted backend."""
    import mla

    def call(**arguments: Any) -> Any:
        return mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, backend="trtllm-gen")

    return call
