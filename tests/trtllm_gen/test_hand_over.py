"""The control that stands beside racecheck's reports of Hopper's decode kernel."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hand_over.py"


def test_both_hand_over_alike_and_differ_in_the_barriers_of_a_group() -> None:
    """`barrier.sync 1` is of all threads and belongs to the hand-over; `bar.sync` here is of one group."""
    kernel: Any = runpy.run_path(str(SCRIPT))["hand_over"]
    counts = {}
    for barrier in (True, False):
        types = {"out_ptr": "*fp32", "number_ptr": "*fp32", "BARRIER": "constexpr"}
        source = GluonASTSource(fn=kernel, signature=types, constexprs={(2,): barrier}, attrs={})
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        counts[barrier] = text.count("barrier.sync \t1;"), text.count("bar.sync ")
    assert counts[True][0] == counts[False][0] > 0
    assert (counts[True][1], counts[False][1]) == (2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("arguments", [[], ["without"]])
def test_the_control_computes_what_it_says(arguments: list[str]) -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("right")
