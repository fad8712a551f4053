"""The number formats in which a decode stores things, and the budget of error that they allow.

**The budget.** A decode differs from exact attention because three things are stored in few bits: the query, the
latents in the cache, and the attention's output. How much that costs depends on the problem, so it is not guessed.
Plain un-absorbed attention is run in float64, with the query, the latents and the output of each head rounded to the
same formats where they are stored, and nothing else rounded. Its error is what the formats alone cost. The budget is
twice its largest error over the decoded tokens. The factor of two is for what a kernel may round besides (softmax
weights, partial sums), and for rounding in another place: the decode stores the absorbed query, 576 numbers per head,
and the attention of latents, 512 per head; the plain run stores 192 and 128. So the two runs draw different rounding
errors of the same size, and one token's draw can be a lucky one: that is why the largest over all tokens counts. No
constant is fitted to a result.

The rounding is written with PyTorch's casts alone, not with `mla.quantize_e4m3`: a fault there must not widen the
budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla.demo.layer import Rounding

ALLOWED = 2.0  # times the error of the plain run with the same formats
E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
OUT_DTYPE = torch.bfloat16  # the call's default, whatever the inputs are


@dataclass(frozen=True)
class Formats:
    """What one configuration of the decode stores the query and the cache in.

    Attributes:
        query: torch.bfloat16 or torch.float8_e4m3fn.
        cache: the same two.
    """

    query: torch.dtype
    cache: torch.dtype

    @property
    def name(self) -> str:
        return f"{_word(self.query)} query, {self.cache_word} cache"

    @property
    def cache_word(self) -> str:
        return _word(self.cache)

    def rounding(self, cache_scale: float) -> Rounding:
        """The rounding of the plain run. An e4m3 query has a scale by the decode's rule, its largest magnitude / 448.

        Args:
            cache_scale: what the decode divides latents by before it stores them in e4m3; unused for other caches.
        """
        return Rounding(
            query=lambda x: stored(x, self.query, float(x.abs().amax()) / LARGEST_E4M3),
            latents=lambda x: stored(x, self.cache, cache_scale),
            output=lambda x: stored(x, OUT_DTYPE),
        )


CONFIGURATIONS = (
    Formats(torch.bfloat16, torch.bfloat16),
    Formats(torch.bfloat16, E4M3),
    Formats(E4M3, E4M3),
)


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """x as it comes back from storage in `dtype`; e4m3 stores x / scale and saturates. Same shape and dtype as x."""
    if dtype is not E4M3:
        return x.to(dtype).to(x.dtype)
    return (x / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(dtype).to(x.dtype) * scale


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """||y - exact|| / ||exact|| of each token, over its hidden numbers: [S, C] and [S, C] -> [S] float64."""
    exact = exact.to(torch.float64)
    squared = (y.to(torch.float64) - exact).square().sum(dim=-1) / exact.square().sum(dim=-1)
    return squared.sqrt()


def budget(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error that a token may have, from the plain run with rounding and the exact one."""
    return ALLOWED * float(relative_error(rounded, exact).max())


def _word(dtype: torch.dtype) -> str:
    return "e4m3" if dtype is E4M3 else "bf16"
