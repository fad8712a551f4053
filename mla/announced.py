"""A backend whose name is known and whose kernels are still to come: it refuses everything, and says why."""

from __future__ import annotations

import torch

from mla.errors import BackendUnsupported
from mla.problem import Problem


class AnnouncedBackend:
    """Refuses every problem with one true sentence."""

    def __init__(self, name: str, sentence: str) -> None:
        self.name = name
        self.sentence = sentence

    def why_not(self, problem: Problem) -> list[str]:
        return [self.sentence]

    def run(self, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        raise BackendUnsupported(self.name, {self.name: self.why_not(problem)})
