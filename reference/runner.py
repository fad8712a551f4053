"""backend="reference": the contract on any device that PyTorch knows."""

from __future__ import annotations

import torch

from mla.capabilities import Capabilities
from mla.problem import Problem
from mla.reference.batched import decode


class ReferenceBackend:
    """Computes in float32 (float64 for float64 inputs) and rounds once, to `out`'s dtype."""

    name = "reference"
    capabilities = Capabilities()

    def why_not(self, problem: Problem) -> list[str]:
        return self.capabilities.refusals(problem)

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        exact, exact_lse = decode(problem, torch.float64 if problem.query.dtype is torch.float64 else torch.float32)
        with torch.no_grad():
            out.copy_(exact)
            if lse is not None:
                lse.copy_(exact_lse)


backend = ReferenceBackend()
