"""The sink: its unit, its head, and how often and where it joins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import LOG2E, Kernel, State
from mla.testing.faults.fault import planted

_planted = partial(planted, "sinks")


@_planted(
    "sinks-ignored",
    "Sinks are accepted and not used.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="normal", scores="equal", values="ones"),
    needs=("sinks",),
)
class SinksIgnored(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        return state


@_planted(
    "sinks-in-a-list-ignored",
    "Sinks that come in a list are not used.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="listed"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="listed", scores="equal", values="ones"),
    needs=("sinks in a list",),
)
class ListIgnored(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if isinstance(arguments.get("sinks"), (list, tuple)):
            arguments["sinks"] = None
        return super().__call__(**arguments)


@_planted(
    "sink-once-per-split",
    "The sink joins the denominator of each of four splits.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="normal", scores="equal", values="ones"),
    needs=("sinks",),
    splits=4,
)
class SinkPerSplit(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        return super().with_sink(p, super().part(p, b, t, z, values))

    def with_sink(self, p: Problem, state: State) -> State:
        return state


@_planted(
    "sink-times-bmm1",
    "The sink is multiplied by bmm1, like a score.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="normal", scores="equal", values="ones", bmm1=3.0),
    needs=("sinks", "bmm1 not 1"),
)
class SinkTimesBmm1(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        return super().with_sink(p if p.sinks is None else replace(p, sinks=p.sinks * self.bmm1(p)), state)


@_planted(
    "sink-in-log2-units",
    "The sink is taken for a logit to base 2.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="large"),
    needs=("sinks",),
)
class SinkInLog2Units(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        return super().with_sink(p if p.sinks is None else replace(p, sinks=p.sinks / LOG2E), state)


@_planted(
    "sink-of-the-next-head",
    "Each head takes the sink of the next one.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="large"),
    needs=("sinks", "several heads"),
)
class SinkOfNextHead(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        return super().with_sink(p if p.sinks is None else replace(p, sinks=p.sinks.roll(-1)), state)


@_planted(
    "sink-by-row-of-heads-first",
    "Rows lie as [B * H, Q], and the sink of a row is that of row % H.",
    Case(lengths=(6, 11), q_len=3, heads=4, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="normal", scores="equal", values="ones"),
    needs=("sinks", "several tokens", "several heads"),
)
class SinkByRow(Kernel):
    token = 0

    def row(self, p: Problem, b: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.token = t
        return super().row(p, b, t)

    def with_sink(self, p: Problem, state: State) -> State:
        if p.sinks is None:
            return state
        rows = torch.arange(p.num_heads, device=p.device) * p.q_len + self.token
        return super().with_sink(replace(p, sinks=p.sinks[rows % p.num_heads]), state)


@_planted(
    "sink-in-the-numerator",
    "The sink is a key with a value of ones.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="normal", scores="equal", values="ones"),
    needs=("sinks",),
)
class SinkInNumerator(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        joined = super().with_sink(p, state)
        if p.sinks is None:
            return joined
        shift = torch.where(joined.top == -math.inf, 0.0, joined.top)
        return joined._replace(sums=joined.sums + torch.exp2(p.sinks * LOG2E - shift)[:, None])


@_planted(
    "sink-not-shifted-by-the-maximum",
    "The total is relative to the largest score, and the sink joins it as it is.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, sinks="normal", scores="peaked"),
    needs=("sinks",),
)
class SinkNotShifted(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        return state if p.sinks is None else state._replace(total=state.total + torch.exp(p.sinks))


@_planted(
    "sink-left-out-of-lse",
    "The sink joins the denominator of the output and not the log-sum-exp.",
    Case(lengths=(5, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(7,), q_len=2, heads=6, page_size=4, sinks="normal", lse="flat", lse_base="basee"),
    needs=("sinks", "lse"),
)
class SinkLeftOutOfLse(Kernel):
    bare: State | None = None

    def with_sink(self, p: Problem, state: State) -> State:
        self.bare = state
        return super().with_sink(p, state)

    def log(self, p: Problem, state: State) -> torch.Tensor:
        return super().log(p, self.bare or state)


@_planted(
    "sink-missing-in-empty-rows",
    "Rows without keys return early with an lse of -inf, although there is a sink.",
    Case(lengths=(0, 9), heads=3, page_size=4, sinks="normal"),
    Case(lengths=(2, 7), q_len=4, heads=2, page_size=4, sinks="large"),
    needs=("sinks", "lse", "empty row"),
)
class SinkMissingInEmptyRows(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        return state if bool((state.total == 0).all()) else super().with_sink(p, state)


@_planted(
    "sinks-off-and-no-key-is-nan",
    "A sink of -inf in a row without keys subtracts infinity from infinity.",
    Case(lengths=(0, 9), heads=3, page_size=4, sinks="off"),
    Case(lengths=(2, 7), q_len=4, heads=2, page_size=4, sinks="off"),
    needs=("sinks that are off", "empty row"),
)
class OffAndEmptyIsNan(Kernel):
    def with_sink(self, p: Problem, state: State) -> State:
        joined = super().with_sink(p, state)
        return joined if p.sinks is None else joined._replace(total=joined.total + (joined.top - joined.top))
