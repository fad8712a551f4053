"""The devices of this machine, found without raising. CUDA is started only where it is available."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla.problem import compute_capability


@dataclass(frozen=True)
class Device:
    """One device, or the trouble in its place.

    Attributes:
        label: "cpu", "cuda:0", or "cuda" for trouble that hides every GPU.
        name: what the device calls itself, or what went wrong.
        capability: (major, minor) of an NVIDIA GPU.
        memory: bytes of memory, where it is known.
        usable: whether tensors can be put there.
    """

    label: str
    name: str
    capability: tuple[int, int] | None = None
    memory: int | None = None
    usable: bool = True


def find_devices() -> list[Device]:
    """The CPU, then every GPU that PyTorch can use."""
    return [Device("cpu", safely(_cpu_name), memory=_cpu_memory()), *_gpus()]


def safely(read: Callable[[], str]) -> str:
    """What `read` returns, or what it raised, in words: one failing answer must not hide the others."""
    try:
        return read()
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {error}"


def _gpus() -> list[Device]:
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        return [Device("cuda", failure(error), usable=False)]
    return [_gpu(index) for index in range(count)]


def _gpu(index: int) -> Device:
    label = f"cuda:{index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        return Device(label, properties.name, compute_capability(torch.device(label)), properties.total_memory)
    except Exception as error:
        return Device(label, failure(error), usable=False)


def _cpu_name() -> str:
    return platform.processor() or platform.machine()


def _cpu_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None
