"""What the kernels need besides PyTorch, and whether this process has it. Nothing is imported before it is needed."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

EXTRA = 'pip install "mla[numba]" brings it'
NUMBA_CUDA = (0, 30)  # the first version of numba-cuda that has launch bounds and force-inlined device functions


def cuda_bindings(name: str) -> Any:
    """A module of `cuda.bindings`, imported now."""
    return import_module(f"cuda.bindings.{name}")


@cache
def missing() -> tuple[str, ...]:
    """Every reason why kernels cannot be compiled and launched here, as sentences; empty when they can.

    Imports `cuda.bindings` (small) and asks the driver for its version; imports no Numba and starts no GPU.
    """
    return (*_numba(), *_cuda())


def _numba() -> list[str]:
    if find_spec("numba") is None:
        return [f"Numba is not installed; {EXTRA}"]
    try:
        version = metadata.version("numba-cuda")
    except metadata.PackageNotFoundError:
        return [f"numba-cuda is not installed, the part of Numba that compiles for GPUs; {EXTRA}"]
    if _numbers(version) < NUMBA_CUDA:
        return [f"numba-cuda is {version}; it needs {'.'.join(map(str, NUMBA_CUDA))} or newer"]
    return []


def _cuda() -> list[str]:
    try:
        driver = cuda_bindings("driver")
    except Exception as error:  # absent, or a library that it loads is broken
        return [f"cuda-bindings cannot be imported ({_short(error)}); {EXTRA}"]
    reasons = []
    try:
        cuda_bindings("nvvm").version()
    except Exception as error:
        reasons.append(f"libnvvm, which turns Numba's code into PTX, cannot be loaded ({_short(error)}); {EXTRA}")
    try:
        status, version = driver.cuDriverGetVersion()
    except Exception as error:
        reasons.append(f"the CUDA driver cannot be loaded ({_short(error)})")
        return reasons
    if int(status) != 0:
        reasons.append(f"the CUDA driver does not tell its version ({status.name})")
        return reasons
    written_for = compiler_version()
    if written_for is not None and written_for > (version // 1000, version % 1000 // 10):
        reasons.append(
            f"libnvvm writes PTX for CUDA {written_for[0]}.{written_for[1]}; the driver understands up to "
            f"{version // 1000}.{version % 1000 // 10}"
        )
    return reasons


def compiler_version() -> tuple[int, int] | None:
    """The CUDA version of the installed libnvvm; None when it is not a Python package."""
    for package in ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"):
        try:
            major, minor, *_ = _numbers(metadata.version(package))
            return major, minor
        except metadata.PackageNotFoundError:
            continue
    return None


def versions() -> tuple[str, ...]:
    """Versions of everything that has a hand in the machine code, for the key of the cache on disk."""
    found = []
    for package in ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "cuda-bindings"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return tuple(found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
