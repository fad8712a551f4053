"""The backend object: what it claims, why it refuses, and how it runs. Triton is imported when it first runs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from mla.capabilities import Capabilities
from mla.checks import DTYPE_PAIRS
from mla.problem import Problem

if TYPE_CHECKING:
    from mla.backends.trtllm_gen.launch import Launcher

_E4M3 = torch.float8_e4m3fn
_PAIRS = frozenset(pair for pair in DTYPE_PAIRS if pair[1] in (torch.bfloat16, torch.float16, _E4M3))
_GPUS = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU in this process (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _triton_is_missing() -> bool:
    return importlib.util.find_spec("triton") is None


class TritonBackend:
    """backend="trtllm-gen": two Triton kernels, one that decodes and one that merges what was split."""

    name = "trtllm-gen"

    def __init__(self) -> None:
        self._launcher: Launcher | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The whole contract, on NVIDIA GPUs from sm_80 on; on the CPU where Triton interprets."""
        claims = Capabilities(
            dtype_pairs=_PAIRS, device_types=("cuda",), compute_capabilities=_GPUS, deterministic=True
        )
        return replace(claims, device_types=("cpu",), compute_capabilities=None) if interpreting() else claims

    def why_not(self, problem: Problem) -> list[str]:
        why = self.capabilities.refusals(problem)
        if problem.kv_cache.dtype == _E4M3 and problem.capability is not None and problem.capability < (8, 9):
            why.append(f"the cache is float8_e4m3fn and the device sm_{problem.capability[0]}{problem.capability[1]}; "
                       "Triton has that dtype from sm_89 on")  # fmt: skip
        if _triton_is_missing():
            why.append("the package triton is not installed; pip install 'mla[triton]' brings it")
        return why

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self._launch()(problem, out, lse)

    def warmup(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Compile and load what such a problem needs; nothing is launched or written."""
        self._launch().find(problem, out, lse)

    def bind(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Callable[..., None]:
        """A function that runs calls like this one; why_not looks at nothing that they can differ in."""
        return self._launch().bind(problem, out, lse)

    def _launch(self) -> Launcher:
        if self._launcher is None:
            from mla.backends.trtllm_gen.launch import Launcher

            self._launcher = Launcher()
        return self._launcher
