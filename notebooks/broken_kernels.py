"""The eight broken kernels of notebook 10. Which fault each has is kept as a fingerprint only."""

from __future__ import annotations

from typing import Any

import torch
from exercises import FINGERPRINTS, fingerprint

from mla.testing.faults import FAULTS

LETTERS = "ABCDEFGH"

SUSPECTS = (
    "bmm1-missing",
    "bmm2-in-the-scores",
    "bmm2-missing",
    "duplicates-merged",
    "first-page-for-all",
    "log2e-forgotten",
    "lse-always-in-base-e",
    "lse-in-two-bases",
    "mask-from-the-top",
    "mask-one-key-early",
    "minus-1-is-the-last-slot",
    "no-causal-mask",
    "page-size-taken-for-64",
    "rope-part-counted-twice",
    "scores-without-the-rope-part",
    "sink-in-log2-units",
    "sink-times-bmm1",
    "sinks-ignored",
    "tile-tail-counts-as-zero-keys",
    "values-from-the-last-columns",
)
"""Twenty faults. Eight of them are among the kernels."""


class BrokenKernel:
    """A kernel that does not tell what is wrong with it."""

    def __init__(self, letter: str) -> None:
        wanted = FINGERPRINTS[f"10-{letter}"]
        (fault,) = (FAULTS[name] for name in SUSPECTS if fingerprint(f"10-{letter}", name) == wanted)
        self._make = fault.make
        self._letter = letter

    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self._make()(**arguments)

    def __repr__(self) -> str:
        return f"kernel {self._letter}"


def kernels() -> dict[str, BrokenKernel]:
    """The eight, by letter."""
    return {letter: BrokenKernel(letter) for letter in LETTERS}


def sentence(name: str) -> str:
    """What a fault does wrong."""
    return FAULTS[name].sentence
