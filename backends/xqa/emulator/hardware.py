"""The emulator's model of each instruction, held against a GPU: the same function, the same random inputs, both ways.

The functions are in `kernel/checks.py`: each reads registers from `source` and writes to `result` what a lane got.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator.launch import Grid, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.kernel import checks

LANES = 32
WORDS = 16
SHARED = 4096
"""Registers that each lane reads, and may write."""


CHECKS: dict[str, tuple[Callable[..., Any], float, tuple[int, int]]] = {
    "mma_bf16": (checks.check_mma_bf16, 2e-6, (8, 0)),
    "mma_fp16": (checks.check_mma_fp16, 2e-6, (8, 0)),
    "mma_e4m3": (checks.check_mma_e4m3, 2e-4, (8, 9)),  # sm_89 and sm_90 keep 14 bits of an e4m3 sum
    "ldmatrix_x4": (checks.check_ldmatrix_x4, 0.0, (8, 0)),
    "ldmatrix_x4_trans": (checks.check_ldmatrix_x4_trans, 0.0, (8, 0)),
    "ldmatrix_x2": (checks.check_ldmatrix_x2, 0.0, (8, 0)),
    "formats": (checks.check_formats, 0.0, (8, 9)),
    "lanes": (checks.check_lanes, 0.0, (8, 0)),
    "math": (checks.check_math, 1e-6, (8, 0)),
}
"""Name -> (kernel, relative error that is allowed, compute capability from which it exists). 0 is bit for bit."""


def random_registers(name: str, seed: int) -> torch.Tensor:
    """[32, 16] words: numbers of the format that the check reads, of mixed sizes."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (LANES, WORDS), generator=random, dtype=torch.int32)
    dtype = {"mma_bf16": torch.bfloat16, "mma_fp16": torch.float16, "mma_e4m3": torch.float8_e4m3fn}.get(name)
    if dtype is not None:
        numbers = torch.randn(LANES, 8 * 4 // dtype.itemsize, generator=random)
        words[:, :8] = numbers.to(dtype).view(torch.int32)
    floats = torch.randn(LANES, WORDS, generator=random) * torch.tensor(2.0).pow(
        torch.randint(-12, 5, (LANES, WORDS), generator=random)
    )
    if dtype is not None:
        words[:, 8:] = floats[:, 8:].view(torch.int32)
    elif name in ("formats", "lanes", "math"):
        words[:, 1:3] = floats[:, 1:3].view(torch.int32)
    return words.contiguous()


def emulated(name: str, source: torch.Tensor) -> torch.Tensor:
    """[32, 16] words: what the emulator makes of them; what a check does not write stays 0."""
    result = torch.zeros_like(source)
    memory = GlobalMemory()
    memory.add("source", source)
    memory.add("result", result, writable=True)
    arguments = {"source": source.data_ptr(), "result": result.data_ptr()}
    run_grid(Grid(_kernel(name), Config(), arguments, 1, LANES, SHARED), memory)
    return result


def measured(name: str, source: torch.Tensor) -> torch.Tensor:
    """[32, 16] words: what the GPU makes of them. `source` is on it, and it is the current device."""
    from mla.backends.xqa.compiler import ptx_of
    from mla.backends.xqa.driver import Driver

    driver = Driver(source.device)
    driver.ensure_context()
    ptx = ptx_of(_kernel(name), "check", ["I64", "I64"], Config(), driver.machine.capability, (LANES, 1))
    result = torch.zeros_like(source)
    addresses = (ctypes.c_int64 * 2)(source.data_ptr(), result.data_ptr())
    first = ctypes.addressof(addresses)
    parameters = (ctypes.c_void_p * 2)(first, first + 8)
    launch = driver.launcher(
        driver.load_ptx(ptx, "check"), 1, LANES, SHARED, ctypes.addressof(parameters), dependent=False
    )
    launch(driver.stream())
    torch.cuda.synchronize(source.device)
    return result


def _kernel(name: str) -> Callable[..., Any]:
    return CHECKS[name][0]


def difference(name: str, measured: torch.Tensor, modelled: torch.Tensor) -> str | None:
    """What is wrong with a GPU's words, or None. NaNs are equal to each other."""
    allowed = CHECKS[name][1]
    if allowed == 0.0:
        wrong = measured != modelled
        if wrong.any():
            lane, word = (int(i) for i in wrong.nonzero()[0])
            got, expected = int(measured[lane, word]) & 0xFFFFFFFF, int(modelled[lane, word]) & 0xFFFFFFFF
            return f"lane {lane} word {word} is {got:#x}; the emulator says {expected:#x} ({int(wrong.sum())} differ)"
        return None
    got_floats, floats = measured.view(torch.float32), modelled.view(torch.float32)
    if not torch.equal(got_floats.isnan(), floats.isnan()):
        return "NaN stands elsewhere"
    size = floats.nan_to_num().abs().clamp(min=1.0)
    error = torch.where(floats.isfinite(), (got_floats - floats).abs() / size, (got_floats != floats).float())
    error = error.nan_to_num()
    return None if error.max() <= allowed else f"an error of {float(error.max()):.3g}; expected at most {allowed:.3g}"
