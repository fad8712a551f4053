"""How rows are dealt to blocks of threads: folded tokens, head blocks, padded heads, the grid."""

from __future__ import annotations

import math
from functools import partial

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import store

_planted = partial(planted, "rows")


class Unwritten(Kernel):
    """A kernel that leaves part of its output as it was. New memory holds NaN, so that this shows every time."""

    def new_out(self, p: Problem) -> torch.Tensor:
        return super().new_out(p).fill_(math.nan)


@_planted(
    "tokens-folded-by-a-power-of-two",
    "Row r is split into request and token by a shift, which is right for Q of 1, 2, 4 and 8 alone.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(7,), q_len=5, heads=2, page_size=4, values="position", scores="equal"),
    needs=("several tokens",),
)
class FoldedByShift(Kernel):
    def row(self, p: Problem, b: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, shift = b * p.q_len + t, p.q_len.bit_length() - 1
        return super().row(p, min(row >> shift, p.batch - 1), row & ((1 << shift) - 1))


@_planted(
    "mask-of-a-tile-of-16-heads",
    "Tokens and heads are folded into rows t * H + h, and the mask takes row // 16 for the token.",
    Case(lengths=(6, 11), q_len=3, heads=4, page_size=4),
    Case(lengths=(7,), q_len=2, heads=20, page_size=4, values="position", scores="equal"),
    needs=("several tokens", "heads not in sixteens"),
)
class TileOf16Heads(Kernel):
    bound: int | None = None

    def visible(self, p: Problem, b: int, t: int) -> int:
        return super().visible(p, b, t if self.bound is None else self.bound)

    def row(self, p: Problem, b: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = [min((t * p.num_heads + h) // 16, p.q_len - 1) for h in range(p.num_heads)]
        out = torch.empty(p.num_heads, p.kv_lora_rank, device=p.device)
        lse = torch.empty(p.num_heads, device=p.device)
        for token in sorted(set(tokens)):
            self.bound = token
            heads = torch.tensor([u == token for u in tokens], device=p.device)
            row, row_lse = super().row(p, b, t)
            out[heads], lse[heads] = row[heads], row_lse[heads]
        self.bound = None
        return out, lse


@_planted(
    "last-partial-head-block-not-written",
    "Only whole blocks of 16 heads are written.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=20, page_size=4),
    needs=("heads not in sixteens",),
)
class PartialHeadBlock(Unwritten):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        heads = p.num_heads // 16 * 16
        out[b, t, :heads] = row[:heads].to(out.dtype)
        lse[b, t] = row_lse


@_planted(
    "heads-repeat-after-16",
    "Head h asks with the query of head h % 16.",
    Case(lengths=(5, 9), heads=17, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=20, page_size=4),
    needs=("more than 16 heads",),
)
class HeadsRepeat(Kernel):
    def query(self, p: Problem, b: int, t: int) -> torch.Tensor:
        return super().query(p, b, t)[torch.arange(p.num_heads, device=p.device) % 16]


@_planted(
    "padded-heads-written-past-the-end",
    "H is rounded up to 16, and the rows of the padding are written behind those of the heads.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="bfloat16"),
    Case(lengths=(6, 11), q_len=2, heads=20, page_size=4, out="float32"),
    needs=("heads not in sixteens", "given out"),
)
class PaddedHeads(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        super().store(p, out, lse, b, t, row, row_lse)
        for h in range(p.num_heads, math.ceil(p.num_heads / 16) * 16):
            offset = b * out.stride(0) + t * out.stride(1) + h * out.stride(2)
            store(out, offset, torch.zeros(p.kv_lora_rank, device=p.device))


@_planted(
    "padded-lse-written-past-the-end",
    "H is rounded up to 16, and the lse of the padding is written behind that of the heads.",
    Case(lengths=(5, 9), heads=3, page_size=4, lse="flat"),
    Case(lengths=(6, 11), q_len=2, heads=20, page_size=4, lse="rows"),
    needs=("heads not in sixteens", "given lse"),
)
class PaddedLse(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        super().store(p, out, lse, b, t, row, row_lse)
        padding = torch.full((math.ceil(p.num_heads / 16) * 16 - p.num_heads,), -math.inf, device=p.device)
        for h, value in enumerate(padding, start=p.num_heads):
            store(lse, b * lse.stride(0) + t * lse.stride(1) + h * lse.stride(2), value[None])


@_planted(
    "last-odd-row-not-written",
    "A block of threads takes two rows, and an odd last row is given to none.",
    Case(lengths=(5,), heads=3, page_size=4),
    Case(lengths=(6, 11, 2), q_len=3, heads=2, page_size=4),
)
class OddRow(Unwritten):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        if b * p.q_len + t < p.batch * p.q_len // 2 * 2:
            super().store(p, out, lse, b, t, row, row_lse)


@_planted(
    "results-stored-tokens-first",
    "The result of request b and token t is stored in row t * B + b.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(5, 9, 4), q_len=2, heads=2, page_size=4, values="request", scores="equal"),
    needs=("several tokens", "several requests"),
)
class TokensFirst(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        place = t * p.batch + b
        super().store(p, out, lse, place // p.q_len, place % p.q_len, row, row_lse)


@_planted(
    "results-stored-heads-first",
    "The results of a request are stored as [H, Q, R].",
    Case(lengths=(6, 11), q_len=3, heads=4, page_size=4),
    Case(lengths=(7,), q_len=2, heads=3, page_size=4, values="position", scores="equal"),
    needs=("several tokens", "several heads"),
)
class HeadsFirst(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        place = torch.arange(p.num_heads, device=p.device) * p.q_len + t
        out[b, place // p.num_heads, place % p.num_heads] = row.to(out.dtype)
        lse[b, t] = row_lse
