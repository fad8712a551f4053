"""The rotation of the position part, with the frequencies that DeepSeek-V3 stretches for long contexts.

Source: YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WIDTH = 64  # numbers rotated per query head and per token


@dataclass(frozen=True)
class Rope:
    """Rotate pairs of numbers by position * frequency. The defaults are those of DeepSeek-V3's published configuration.

    Attributes:
        theta: base of the frequencies, theta ** (-i / 32) for pair i.
        interleaved: pair i is (2i, 2i + 1), as DeepSeek's weights have it; otherwise it is (i, i + 32). Rotated numbers
            stay where they are. A cache holds them so: query and latents must agree, and nothing else cares.
        factor: how far YaRN stretches the context; 1 is plain rope.
        trained_length: positions of the training before the stretch.
        fast_turns, slow_turns: pairs that turn more often than `fast_turns` over the trained length keep their
            frequency, those that turn less often than `slow_turns` have it divided by `factor`, and those between are
            blended.
    """

    theta: float = 10000.0
    interleaved: bool = True
    factor: float = 40.0
    trained_length: int = 4096
    fast_turns: float = 32.0
    slow_turns: float = 1.0

    @property
    def score_factor(self) -> float:
        """What YaRN multiplies the scores by: (0.1 * ln(factor) + 1) squared, and 1 without a stretch."""
        return (0.1 * math.log(self.factor) + 1.0) ** 2

    def frequencies(self) -> torch.Tensor:
        """Radians per position of each pair, [32] float64."""
        pair = torch.arange(WIDTH // 2, dtype=torch.float64)
        own = self.theta ** (-2.0 * pair / WIDTH)
        if self.factor == 1.0:
            return own
        first = max(math.floor(self._pair_that_turns(self.fast_turns)), 0)
        last = min(math.ceil(self._pair_that_turns(self.slow_turns)), WIDTH - 1)
        stretched = ((pair - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
        return own * (1.0 - stretched) + own / self.factor * stretched

    def _pair_that_turns(self, times: float) -> float:
        """The (fractional) pair that turns so many times over the trained length."""
        return WIDTH / 2 * math.log(self.trained_length / (2.0 * math.pi * times)) / math.log(self.theta)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [..., 64] in its own dtype; `positions` are integers that broadcast with x's leading axes.

        Angles are taken in float64: a float32 angle would be off by position * 2**-24.
        """
        angle = positions[..., None].to(torch.float64) * self.frequencies().to(x.device)  # [..., 32]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
