"""The device's own rates, in the same run and by the same clock: copying, reading, multiplying, and doing nothing."""

from __future__ import annotations

from functools import partial

import torch

from mla.bench.floors import Ceilings
from mla.bench.timing import Timer

GPU_BYTES, CPU_BYTES = 1 << 31, 1 << 24
GPU_SIDE, CPU_SIDE = 8192, 256


def measure(timer: Timer) -> Ceilings:
    """What the device does at its best. On a CPU the sizes are small and the numbers rough."""
    copy_gbs, read_gbs = _memory_gbs(timer)
    return Ceilings(copy_gbs, read_gbs, _bf16_tflops(timer), _empty_graph_us(timer) if timer.on_gpu else None)


def _memory_gbs(timer: Timer) -> tuple[float, float]:
    count = (GPU_BYTES if timer.on_gpu else CPU_BYTES) // 4
    source = torch.rand(count, device=timer.device)
    target = torch.empty_like(source)
    copy_us = timer.median_us(partial(target.copy_, source))
    read_us = timer.median_us(source.sum)
    return 2 * 4 * count / copy_us / 1e3, 4 * count / read_us / 1e3


def _bf16_tflops(timer: Timer) -> float:
    side = GPU_SIDE if timer.on_gpu else CPU_SIDE
    left, right = (torch.randn(side, side, device=timer.device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * side**3 / timer.median_us(lambda: torch.matmul(left, right, out=product)) / 1e6


def _empty_graph_us(timer: Timer) -> float:
    """A graph of one kernel that adds 1 to one number."""
    one = torch.zeros(1, device=timer.device)
    return timer.median_us(timer.capture(lambda: one.add_(1.0)).replay)
