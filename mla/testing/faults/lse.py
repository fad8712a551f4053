"""The log-sum-exp: its base, what belongs to it, rows without keys, and its buffer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import LOG2E, Kernel, State
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import store

_planted = partial(planted, "lse")


@_planted(
    "lse-always-in-base-e",
    "The lse is natural, whatever base was asked for.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(8,), q_len=2, heads=2, page_size=4, lse="rows", scores="equal"),
    needs=("lse in base 2",),
)
class AlwaysNatural(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return (state.top + torch.log2(state.total)) / LOG2E


@_planted(
    "lse-always-in-base-2",
    "The lse is to base 2, also when the natural one was asked for.",
    Case(lengths=(5, 9), heads=3, page_size=4, lse_base="basee"),
    Case(lengths=(8,), q_len=2, heads=2, page_size=4, lse="flat", lse_base="basee", scores="equal"),
    needs=("lse in base e",),
)
class AlwaysBase2(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return state.top + torch.log2(state.total)


@_planted(
    "lse-in-two-bases",
    "The maximum is to base 2, and the logarithm of the total is natural.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(8,), q_len=2, heads=2, page_size=4, lse_base="basee", scores="peaked"),
    needs=("lse",),
)
class TwoBases(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return state.top + torch.log(state.total)


@_planted(
    "lse-without-the-maximum",
    "The lse is the logarithm of the shifted total.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(8,), q_len=2, heads=2, page_size=4, lse_base="basee", scores="peaked"),
    needs=("lse",),
)
class WithoutMaximum(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return super().log(p, state._replace(top=torch.where(state.total > 0, 0.0, state.top)))


@_planted(
    "lse-with-bmm2",
    "The logarithm of bmm2 is added to the lse.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm2=0.5),
    Case(lengths=(8,), q_len=2, heads=2, page_size=4, lse_base="basee", bmm2=3.0),
    needs=("lse", "bmm2 not 1"),
)
class WithBmm2(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return super().log(p, state._replace(total=state.total * abs(self.bmm2(p))))


@_planted(
    "lse-in-bf16",
    "The lse is rounded to bf16.",
    Case(lengths=(5, 9), heads=3, page_size=4, scores="peaked"),
    Case(lengths=(40,), q_len=2, heads=2, page_size=16, query="float16", cache="float16"),
    needs=("lse",),
)
class InBf16(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return super().log(p, state).to(torch.bfloat16).to(torch.float32)


@_planted(
    "lse-of-empty-rows-is-a-finite-sentinel",
    "The lse of a row without keys is -1e30.",
    Case(lengths=(0, 9), heads=3, page_size=4),
    Case(lengths=(2, 7), q_len=4, heads=2, page_size=4, lse_base="basee"),
    needs=("lse", "empty row"),
)
class FiniteSentinel(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        return super().log(p, state).clamp(min=-1e30)


@_planted(
    "lse-of-empty-rows-is-plus-infinity",
    "The lse of a row without keys is +inf.",
    Case(lengths=(0, 9), heads=3, page_size=4),
    Case(lengths=(20, 9), q_len=2, heads=2, page_size=4, top_k=8, slots="all_holes"),
    needs=("lse", "empty row"),
)
class PlusInfinity(Kernel):
    def log(self, p: Problem, state: State) -> torch.Tensor:
        lse = super().log(p, state)
        return torch.where(lse == -math.inf, math.inf, lse)


@_planted(
    "lse-of-empty-rows-not-written",
    "The lse of a row without keys is left as it was.",
    Case(lengths=(0, 9), heads=3, page_size=4, lse="flat"),
    Case(lengths=(2, 7), q_len=4, heads=2, page_size=4, lse="rows"),
    needs=("given lse", "empty row"),
)
class EmptyLseNotWritten(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        kept = lse[b, t] if p.lse is not None and bool((row_lse == -math.inf).all()) else row_lse
        super().store(p, out, lse, b, t, row, kept)


@_planted(
    "lse-stored-heads-first",
    "The lse is stored as [H, B * Q].",
    Case(lengths=(6, 11), q_len=3, heads=4, page_size=4),
    Case(lengths=(5, 9), q_len=2, heads=4, page_size=4, lse="flat"),
    needs=("lse", "several heads"),
)
class LseHeadsFirst(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        super().store(p, out, lse, b, t, row, row_lse)
        place = torch.arange(p.num_heads, device=p.device) * (p.batch * p.q_len) + b * p.q_len + t
        lse[place // (p.q_len * p.num_heads), place // p.num_heads % p.q_len, place % p.num_heads] = row_lse


@_planted(
    "lse-strides-ignored",
    "A given lse is written as if it were packed.",
    Case(lengths=(5, 9), heads=3, page_size=4, lse="flat"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, lse="transposed"),
    needs=("strided lse",),
)
class LsePacked(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        out[b, t] = row.to(out.dtype)
        store(lse, (b * p.q_len + t) * p.num_heads, row_lse)


@_planted(
    "given-lse-replaced",
    "A given lse is left as it is, and a new tensor is returned.",
    Case(lengths=(5, 9), heads=3, page_size=4, lse="flat"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, lse="rows"),
    needs=("given lse",),
)
class LseReplaced(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return super().__call__(**(arguments | {"lse": None}))
