"""Shared by the tests of the xqa kernels: the emulated backend as a function with the call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla.backends.xqa.emulator.backend import EmulatedBackend
from mla.problem import Problem
from mla.testing import Case, assert_close, build


def call_of(**options: Any) -> Callable[..., Any]:
    """A function with the keyword arguments of the call, computed in the emulator; options of `EmulatedBackend`."""
    backend = EmulatedBackend(**options)

    def call(**arguments: Any) -> Any:
        p = Problem.from_call(**arguments)
        assert backend.why_not(p) == []
        out, lse = arguments["out"], arguments["lse"]
        out_view, lse_view = p.out, p.lse
        if out is None:
            out = out_view = torch.empty(p.batch, p.q_len, p.num_heads, p.kv_lora_rank, dtype=p.out_dtype)
        if lse is None and p.wants_lse:
            lse = torch.empty(p.batch * p.q_len, p.num_heads)
            lse_view = lse.view(p.batch, p.q_len, p.num_heads)
        if not p.is_empty:
            backend.run(p, out_view, lse_view)
        return (out, lse) if arguments["return_lse"] else out

    return call


@pytest.fixture
def emulated_call() -> Callable[..., Any]:
    return call_of


@pytest.fixture
def emulate() -> Callable[..., None]:
    """emulate(case, **options): run a case in the emulator and judge it."""

    def run(case: Case, **options: Any) -> None:
        call = build(case)
        assert_close(call.run(call_of(**options)), call.problem)
        assert call.disturbed() == []

    return run
