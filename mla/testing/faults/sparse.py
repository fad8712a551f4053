"""Sparse lists: which entries count, what they mean, and what a hole is."""

from __future__ import annotations

import math
from functools import partial

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel, State
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import Careless, load, load_as_int32

_planted = partial(planted, "sparse")


@_planted(
    "minus-1-is-the-last-slot",
    "Negative slots count from the end of the pool, as Python indexes do.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="holes"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, slots="front"),
    needs=("sparse", "negative holes"),
)
class FromTheEnd(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        listed = super().listed(p, b, t, n)
        return torch.where(listed < 0, (listed + p.num_pages * p.page_size).clamp(0), listed)


@_planted(
    "only-minus-1-is-a-hole",
    "-1 is skipped, and other negative slots read the first one.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="holes"),
    Case(lengths=(30,), q_len=2, heads=2, page_size=4, top_k=20, slots="holes", seed=1),
    needs=("sparse", "negative holes"),
)
class OnlyMinus1(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        listed = super().listed(p, b, t, n)
        return torch.where(listed < -1, 0, listed)


@_planted(
    "slots-past-the-pool-clamped",
    "A slot past the pool reads the last slot.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="past"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, slots="past", seed=1),
    needs=("sparse", "slots past the pool"),
)
class Clamped(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return super().listed(p, b, t, n).clamp(max=p.num_pages * p.page_size - 1)


@_planted(
    "duplicates-merged",
    "A slot that stands in the list twice counts once.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="duplicates"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, slots="duplicates"),
    needs=("sparse", "duplicates"),
)
class DuplicatesMerged(Kernel):
    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        slots = super().slots(p, b, t, n)
        return torch.tensor(sorted(set(slots.tolist())), dtype=torch.int64, device=p.device) if p.is_sparse else slots


@_planted(
    "slots-taken-for-page-ids",
    "Entry i of the list is taken for a page, of which token i % P is read.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6),
    needs=("sparse",),
)
class TakenForPages(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        pages = super().listed(p, b, t, n)
        slots = pages * p.page_size + torch.arange(len(pages), device=p.device) % p.page_size
        return torch.where(pages < 0, pages, slots.clamp(max=p.num_pages * p.page_size - 1))


@_planted(
    "all-K-entries-count",
    "All K entries of a list are read, also those after the first min(n, K).",
    Case(lengths=(5, 9), heads=3, page_size=4, top_k=12, tail="zero"),
    Case(lengths=(3,), q_len=2, heads=2, page_size=4, top_k=6, tail="zero", unread="zero"),
    needs=("sparse", "list longer than needed"),
)
class AllEntries(Kernel):
    def visible(self, p: Problem, b: int, t: int) -> int:
        return p.top_k if p.is_sparse else super().visible(p, b, t)


@_planted(
    "entries-counted-per-request",
    "Every token of a request reads min(length, K) entries, as many as its last token.",
    Case(lengths=(5, 9), q_len=3, heads=3, page_size=4, top_k=12, tail="zero"),
    Case(lengths=(3,), q_len=2, heads=2, page_size=4, top_k=6, tail="zero", unread="zero"),
    needs=("sparse", "several tokens", "list longer than needed"),
)
class CountedPerRequest(Kernel):
    def visible(self, p: Problem, b: int, t: int) -> int:
        return super().visible(p, b, p.q_len - 1 if p.is_sparse else t)


@_planted(
    "holes-use-no-place",
    "The first min(n, K) entries that are no holes count, so those after the list's end take the place of holes.",
    Case(lengths=(5, 9), heads=3, page_size=4, top_k=24, slots="holes", tail="zero"),
    Case(lengths=(7,), q_len=2, heads=2, page_size=4, top_k=12, slots="front", tail="zero"),
    needs=("sparse", "holes", "list longer than needed"),
)
class HolesUseNoPlace(Careless):
    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return super().slots(p, b, t, p.top_k)[:n] if p.is_sparse else super().slots(p, b, t, n)


@_planted(
    "list-ends-at-the-first-hole",
    "Holes are expected at the back: the list ends at the first.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="holes"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, slots="front"),
    needs=("sparse", "holes"),
)
class EndsAtHole(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        listed = super().listed(p, b, t, n)
        live = (listed >= 0) & (listed < p.num_pages * p.page_size)
        return listed[live.long().cumprod(0).bool()]


@_planted(
    "list-of-the-first-token",
    "Every token of a request reads the first token's list.",
    Case(lengths=(20, 9), q_len=3, heads=3, page_size=4, top_k=8),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6),
    needs=("sparse", "several tokens"),
)
class ListOfFirstToken(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return super().listed(p, b, 0, n)


@_planted(
    "list-strides-ignored",
    "The lists are taken to be packed.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, table_layout="sliced"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, table_layout="spread"),
    needs=("sparse", "strided table"),
)
class PackedLists(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        entries = torch.arange(min(n, p.top_k), device=p.device)
        return load(p.block_tables, (b * p.q_len + t) * p.top_k + entries).to(torch.int64)


@_planted(
    "int64-list-read-as-int32",
    "A list of int64 is read as int32: every second entry is the upper half of its neighbour.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, tables="int64"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, tables="int64"),
    needs=("sparse", "int64 tables"),
)
class ListAsInt32(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        if p.block_tables.dtype is torch.int32:
            return super().listed(p, b, t, n)
        entries = torch.arange(min(n, p.top_k), device=p.device) * p.block_tables.stride(2)
        first = b * p.block_tables.stride(0) + t * p.block_tables.stride(1)
        return load_as_int32(p.block_tables, first + entries).to(torch.int64)


@_planted(
    "list-read-in-fours",
    "Entries are read four at a time, and a rest of fewer is dropped.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=7),
    Case(lengths=(6,), q_len=2, heads=2, page_size=4, top_k=16),
    needs=("sparse",),
)
class ReadInFours(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return super().listed(p, b, t, n // 4 * 4)


@_planted(
    "causal-mask-on-slots",
    "Slots are compared with the number of visible keys, as if they were positions.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, seed=1),
    needs=("sparse",),
)
class MaskOnSlots(Careless):
    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        listed = super().listed(p, b, t, n)
        return listed[listed < max(int(p.seq_lens[b]) - p.q_len + t + 1, 0)]


@_planted(
    "holes-stay-in-the-denominator",
    "A hole counts as a key of zeros: it adds no value, and a weight of exp(0) to the denominator.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="holes"),
    Case(lengths=(9,), q_len=2, heads=2, page_size=4, top_k=6, slots="past", scores="flat"),
    needs=("sparse", "holes"),
)
class HolesInDenominator(Careless):
    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return self.listed(p, b, t, n) if p.is_sparse else super().slots(p, b, t, n)

    def keys(self, p: Problem, slots: torch.Tensor) -> torch.Tensor:
        hole = (slots < 0) | (slots >= p.num_pages * p.page_size)
        return torch.where(hole[:, None] & p.is_sparse, 0.0, super().keys(p, slots))


@_planted(
    "values-of-holes-times-zero",
    "The score of a hole is masked and its value is not: the nearest slot of the pool is loaded and multiplied by 0.",
    Case(lengths=(20, 9), heads=3, page_size=4, top_k=8, slots="holes"),
    Case(lengths=(30,), q_len=2, heads=2, page_size=4, top_k=12, slots="past", unread="inf", seed=1),
    needs=("sparse", "holes", "unread memory"),
)
class HolesTimesZero(Careless):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        if p.is_sparse and z.shape[1]:
            listed = self.listed(p, b, t, self.visible(p, b, t))
            holes = listed[(listed < 0) | (listed >= p.num_pages * p.page_size)]
            values = torch.cat([values, self.values(p, self.keys(p, holes))])
            z = torch.cat([z, torch.full((len(z), len(holes)), -math.inf, device=p.device)], dim=1)
        return super().part(p, b, t, z, values)


@_planted(
    "leading-holes-are-nan",
    "A first block that holds nothing but holes has a maximum of -inf, which is subtracted from itself.",
    Case(lengths=(40,), heads=3, page_size=4, top_k=34, slots="front"),
    Case(lengths=(20, 9), q_len=2, heads=2, page_size=4, top_k=8, slots="all_holes"),
    needs=("sparse", "holes"),
    block=16,
)
class LeadingHoles(Careless):
    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return self.listed(p, b, t, n) if p.is_sparse else super().slots(p, b, t, n)

    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        if p.is_sparse:
            listed = self.listed(p, b, t, self.visible(p, b, t))
            hole = (listed < 0) | (listed >= p.num_pages * p.page_size)
            z, values = z.masked_fill(hole, -math.inf), values.masked_fill(hole[:, None], 0.0)
        return super().part(p, b, t, z, values)
