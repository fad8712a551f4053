"""Keys dealt into splits, and the merge of their partial results."""

from __future__ import annotations

import math
from functools import partial

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel, State
from mla.testing.faults.fault import planted

_planted = partial(planted, "splits")


@_planted(
    "last-split-dropped",
    "The merge leaves out the last of four splits.",
    Case(lengths=(12, 9), heads=3, page_size=4),
    Case(lengths=(16, 7), q_len=2, heads=2, page_size=4, values="position", scores="equal"),
    splits=4,
)
class LastSplitDropped(Kernel):
    def merge(self, p: Problem, parts: list[State]) -> State:
        return super().merge(p, parts[:-1])


@_planted(
    "splits-overlap-by-one-key",
    "Each split ends one key late, so the first key of the next one counts twice.",
    Case(lengths=(12, 9), heads=3, page_size=4),
    Case(lengths=(16, 7), q_len=2, heads=2, page_size=4, values="position", scores="equal"),
    splits=3,
)
class SplitsOverlap(Kernel):
    def bounds(self, p: Problem, n: int) -> list[tuple[int, int]]:
        return [(start, min(stop + 1, n)) for start, stop in super().bounds(p, n)]


@_planted(
    "split-size-rounded-down",
    "The keys are dealt by n // splits, and the rest of the division is lost.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(18, 7), q_len=2, heads=2, page_size=4, values="position", scores="equal"),
    splits=4,
)
class SplitSizeRoundedDown(Kernel):
    def bounds(self, p: Problem, n: int) -> list[tuple[int, int]]:
        size = n // self.splits
        return [(i * size, (i + 1) * size) for i in range(self.splits)]


@_planted(
    "splits-merged-without-rescaling",
    "The sums of the splits are added up although each has its own maximum.",
    Case(lengths=(12, 9), heads=3, page_size=4),
    Case(lengths=(40,), heads=2, page_size=16, scores="one_hot", bmm1=0.05),
    splits=3,
)
class MergedWithoutRescaling(Kernel):
    def merge(self, p: Problem, parts: list[State]) -> State:
        top = torch.stack([part.top for part in parts]).amax(dim=0)
        sums = torch.stack([part.sums for part in parts]).sum(dim=0)
        return State(sums, torch.stack([part.total for part in parts]).sum(dim=0), top)


@_planted(
    "splits-merged-in-the-wrong-base",
    "The splits hold log2 values, and the merge raises e to them.",
    Case(lengths=(12, 9), heads=3, page_size=4),
    Case(lengths=(40,), heads=2, page_size=16, scores="one_hot", bmm1=0.05),
    splits=3,
)
class MergedInBaseE(Kernel):
    def merge(self, p: Problem, parts: list[State]) -> State:
        top = torch.stack([part.top for part in parts]).amax(dim=0)
        shift = torch.where(top == -math.inf, 0.0, top)
        factors = [torch.exp(part.top - shift) for part in parts]
        sums = torch.stack([f[:, None] * part.sums for f, part in zip(factors, parts, strict=True)]).sum(dim=0)
        return State(
            sums, torch.stack([f * part.total for f, part in zip(factors, parts, strict=True)]).sum(dim=0), top
        )


@_planted(
    "splits-averaged",
    "The results of the splits with keys are averaged, whatever they weigh.",
    Case(lengths=(13, 9), heads=3, page_size=4),
    Case(lengths=(40,), heads=2, page_size=16, scores="one_hot", bmm1=0.05),
    splits=3,
)
class SplitsAveraged(Kernel):
    def merge(self, p: Problem, parts: list[State]) -> State:
        merged = super().merge(p, parts)
        live = [part.sums / part.total[:, None] for part in parts if part.top.isfinite().all()]
        if not live:
            return merged
        return merged._replace(sums=torch.stack(live).mean(dim=0) * merged.total[:, None])


@_planted(
    "empty-split-is-nan",
    "A split without keys divides by its total of 0, and the merge multiplies its NaN by a weight of 0.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(2, 7), q_len=2, heads=2, page_size=4),
    splits=4,
)
class EmptySplitIsNan(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        state = super().part(p, b, t, z, values)
        return state if z.shape[1] else state._replace(sums=torch.full_like(state.sums, math.nan))


@_planted(
    "empty-split-weighs-1",
    "A split without keys takes part in the merge with a maximum of 0 and a total of 1.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(2, 7), q_len=2, heads=2, page_size=4),
    splits=4,
)
class EmptySplitWeighs1(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        state = super().part(p, b, t, z, values)
        return state if z.shape[1] else State(state.sums, torch.ones_like(state.total), torch.zeros_like(state.top))


@_planted(
    "all-splits-empty-is-nan",
    "The merge subtracts the largest maximum from itself, and -inf - (-inf) is NaN for a row without keys.",
    Case(lengths=(0, 9), heads=3, page_size=4),
    Case(lengths=(2, 7), q_len=4, heads=2, page_size=4),
    needs=("empty row",),
    splits=2,
)
class AllEmptyIsNan(Kernel):
    def merge(self, p: Problem, parts: list[State]) -> State:
        merged = super().merge(p, parts)
        return merged._replace(total=merged.total + (merged.top - merged.top))


@_planted(
    "splits-dealt-by-max-seq-len",
    "A split holds max_seq_len // splits keys, so the last keys of a long request belong to none.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(19, 7), q_len=2, heads=2, page_size=4, values="position", scores="equal"),
    splits=4,
)
class DealtByBound(Kernel):
    def bounds(self, p: Problem, n: int) -> list[tuple[int, int]]:
        size = p.max_seq_len // self.splits
        return [(min(i * size, n), min((i + 1) * size, n)) for i in range(self.splits)]
