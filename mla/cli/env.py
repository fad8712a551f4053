"""Show versions, packages and devices of this machine.

For bug reports. What cannot be found out is a row that says so; nothing here raises.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

import mla
from mla.cli.devices import find_devices, safely
from mla.cli.tables import Table, add_style_argument, show

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "numba": "numba",
    "numba-cuda": "numba_cuda",
    "cuda-bindings": "cuda",
    "nvidia-cuda-nvrtc": None,
    "nvidia-nvvm": None,
    "flashinfer-python": "flashinfer",
    "numpy": "numpy",
    "transformers": "transformers",
    "matplotlib": "matplotlib",
    "rich": "rich",
}
"""Distribution -> the module that is looked for (not imported), or None where there is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_style_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    show([software(), packages(), devices()], arguments.style)
    return 0


def software() -> Table:
    questions = {
        "mla": lambda: f"{mla.__version__} at {os.path.dirname(os.path.abspath(mla.__file__))}",
        "python": lambda: f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}",
        "system": platform.platform,
        "CPUs": lambda: f"{os.cpu_count()}, PyTorch uses {torch.get_num_threads()} threads",
        "torch": lambda: f"{torch.__version__}, built for {_built_for()}",
        "CUDA_VISIBLE_DEVICES": lambda: repr(os.environ.get("CUDA_VISIBLE_DEVICES", "not set")),
        "MLA_STRICT": lambda: repr(os.environ.get("MLA_STRICT", "not set")),
    }
    return Table("software", ("what", "found"), [(what, safely(read)) for what, read in questions.items()])


def packages() -> Table:
    rows = [
        (distribution, safely(partial(_version, distribution)), safely(partial(_found, module)))
        for distribution, module in PACKAGES.items()
    ]
    return Table("packages", ("package", "version", "importable"), rows)


def devices() -> Table:
    rows = []
    for device in find_devices():
        capability = "-" if device.capability is None else "sm_{}{}".format(*device.capability)
        memory = "-" if device.memory is None else f"{device.memory / 2**30:.1f} GiB"
        rows.append((device.label, capability, memory, device.name))
    return Table("devices", ("device", "capability", "memory", "name"), rows)


def _built_for() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _found(module: str | None) -> str:
    if module is None:
        return "-"
    return "no" if find_spec(module) is None else "yes"
