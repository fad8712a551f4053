"""A paged cache of latents as a serving engine keeps it: shuffled pages, one table row per request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

import mla

SPARE_PAGES = 3  # of nobody


class PagedCache:
    """The tensors that the decode call takes: `pages`, `tables`, `lengths`.

    Slots that nobody wrote hold NaN, so that a read outside a request's tokens shows.

    Args:
        capacity: for each of the B requests, the tokens that it may grow to.
        dtype: of the pages: bfloat16, float16, float32, float64 or float8_e4m3fn.
        page_size: P.
        seed: of the pages' order.
        device: of everything.
        scale: what latents are divided by, for a float8_e4m3fn cache; a float32 tensor of 1 element.
    """

    def __init__(
        self,
        capacity: Sequence[int],
        dtype: torch.dtype,
        *,
        page_size: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
        scale: torch.Tensor | None = None,
    ) -> None:
        used = [math.ceil(tokens / page_size) for tokens in capacity]
        pool = sum(used) + SPARE_PAGES
        order = iter(torch.randperm(pool, generator=torch.Generator().manual_seed(seed)).tolist())
        width = max(used)
        rows = [[next(order) if column < pages else -1 for column in range(width)] for pages in used]
        self.scale = scale
        self.pages = torch.full((pool, page_size, 576), math.nan, dtype=dtype, device=device)  # [N, P, D]
        self.tables = torch.tensor(rows, dtype=torch.int32, device=device)  # [B, W], -1 past a request's pages
        self.lengths = torch.zeros(len(used), dtype=torch.int32, device=device)  # [B]
        self.longest = max(capacity)

    def append(self, latents: torch.Tensor, lengths: Sequence[int] | None = None) -> None:
        """Write the newest tokens of every request.

        Args:
            latents: [B, Q, D]. A request with fewer than Q new tokens has them at the right end of its row.
            lengths: the requests' tokens afterwards; None: each grows by Q.
        """
        if lengths is None:
            self.lengths = self.lengths + latents.shape[1]
        else:
            self.lengths = torch.tensor(lengths, dtype=torch.int32, device=self.lengths.device)
        mla.append_tokens(self.pages, self.tables, self.lengths, latents, scale=self.scale)

    @property
    def bytes_per_token(self) -> int:
        return self.pages.shape[-1] * self.pages.element_size()
