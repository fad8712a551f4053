"""Which keys are seen: lengths, the causal mask, and loops that stop too early."""

from __future__ import annotations

import math
from functools import partial

import torch

from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel, State
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import Careless, load, load_as_int32

_planted = partial(planted, "masking")


@_planted(
    "mask-one-key-late",
    "Every token sees one key more than it may.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4, unread="zero"),
)
class OneKeyLate(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        return super().visible(p, b, t) + 1


@_planted(
    "mask-one-key-early",
    "Every token misses the last key that it may see: its own.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4, values="position", scores="equal"),
)
class OneKeyEarly(Kernel):
    def visible(self, p: Problem, b: int, t: int) -> int:
        return max(super().visible(p, b, t) - 1, 0)


@_planted(
    "first-key-left-out",
    "The loop begins at the second key.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(1, 12), heads=2, page_size=3, values="position", scores="equal"),
)
class FirstKeyLeftOut(Kernel):
    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        return super().slots(p, b, t, n)[1:]


@_planted(
    "mask-from-the-top",
    "With several tokens the mask is aligned at the first key: token t sees t + 1 keys.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(9,), q_len=2, heads=3, page_size=4, values="position", scores="equal"),
    needs=("several tokens",),
)
class FromTheTop(Kernel):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = super().visible(p, b, t)
        return n if p.q_len == 1 else min(n, t + 1)


@_planted(
    "no-causal-mask",
    "Every token sees the whole length, the tokens after it included.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(2, 7), q_len=4, heads=3, page_size=4, values="position", scores="equal"),
    needs=("several tokens",),
)
class NoCausalMask(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        return super().visible(p, b, p.q_len - 1)


@_planted(
    "causal-bound-for-one-token",
    "The bound is computed as if there were one new token: token t sees length + t keys.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(9,), q_len=2, heads=3, page_size=4, unread="zero"),
    needs=("several tokens",),
)
class BoundForOneToken(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = int(p.seq_lens[b]) + t
        return min(n, p.top_k) if p.is_sparse else n


@_planted(
    "lengths-without-new-tokens",
    "The lengths are taken to exclude the new tokens: token t sees length + t + 1 keys.",
    Case(lengths=(6, 11), q_len=3, heads=3, page_size=4),
    Case(lengths=(5, 9), heads=3, page_size=4, unread="noise"),
)
class LengthsWithoutNewTokens(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = int(p.seq_lens[b]) + t + 1
        return min(n, p.top_k) if p.is_sparse else n


@_planted(
    "length-rounded-up-to-the-page",
    "Whole pages are read: the slots after the last key count as keys.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=3, page_size=4, unread="zero"),
    needs=("dense",),
)
class WholePages(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = super().visible(p, b, t)
        return n if p.is_sparse else math.ceil(n / p.page_size) * p.page_size


@_planted(
    "tile-tail-counts-as-zero-keys",
    "The loads past the length are masked and the scores are not: the rest of a tile of 16 counts as keys of zeros.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(17,), heads=3, page_size=4, values="ones", scores="equal"),
    needs=("one token", "dense"),
)
class TileTailCounts(Kernel):
    def keys(self, p: Problem, slots: torch.Tensor) -> torch.Tensor:
        keys = super().keys(p, slots)
        more = self._whole_tiles(p, len(keys)) - len(keys)
        return torch.cat([keys, torch.zeros(more, p.head_dim, device=p.device)])

    def bounds(self, p: Problem, n: int) -> list[tuple[int, int]]:
        return super().bounds(p, self._whole_tiles(p, n))

    def _whole_tiles(self, p: Problem, n: int) -> int:
        return n if p.is_sparse or p.q_len > 1 else math.ceil(n / 16) * 16


@_planted(
    "last-partial-tile-dropped",
    "After the first tile of 16 keys only whole tiles are read.",
    Case(lengths=(18, 9), heads=3, page_size=4),
    Case(lengths=(37,), heads=3, page_size=8, values="position", scores="equal"),
)
class PartialTileDropped(Kernel):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = super().visible(p, b, t)
        return n if n < 16 else n // 16 * 16


@_planted(
    "length-of-the-first-request",
    "Every request is as long as the first.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(9, 3, 7), heads=3, page_size=4, values="position", scores="equal"),
    needs=("several requests",),
)
class LengthOfTheFirst(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        return super().visible(p, 0, t)


@_planted(
    "max-seq-len-taken-for-the-length",
    "Every request is taken to be max_seq_len long.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(5,), heads=3, page_size=4, max_slack=1, unread="zero"),
)
class BoundTakenForLength(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = max(p.max_seq_len - p.q_len + t + 1, 0)
        return min(n, p.top_k) if p.is_sparse else n


@_planted(
    "max-seq-len-cuts-the-last-page",
    "The loop runs over max_seq_len // P pages, and the last partial page of the longest request is lost.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(7,), q_len=2, heads=3, page_size=4, max_slack=0),
    needs=("dense",),
)
class BoundCutsThePage(Kernel):
    def visible(self, p: Problem, b: int, t: int) -> int:
        n = super().visible(p, b, t)
        return n if p.is_sparse else min(n, p.max_seq_len // p.page_size * p.page_size)


@_planted(
    "int64-lengths-read-as-int32",
    "Lengths of int64 are read as int32: every second one is the upper half of its neighbour.",
    Case(lengths=(5, 9), heads=3, page_size=4, lens="int64"),
    Case(lengths=(4, 7, 3), q_len=2, heads=3, page_size=4, lens="int64"),
    needs=("int64 lengths", "several requests"),
)
class LengthsAsInt32(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        if p.seq_lens.dtype is torch.int32:
            return super().visible(p, b, t)
        length = int(load_as_int32(p.seq_lens, torch.tensor(b * p.seq_lens.stride(0), device=p.device)))
        n = max(length - p.q_len + t + 1, 0)
        return min(n, p.top_k) if p.is_sparse else n


@_planted(
    "length-stride-ignored",
    "The lengths are taken to lie side by side.",
    Case(lengths=(5, 9), heads=3, page_size=4, table_layout="spread"),
    Case(lengths=(4, 7, 3), q_len=2, heads=3, page_size=4, table_layout="spread"),
    needs=("spread table", "several requests"),
)
class LengthStrideIgnored(Careless):
    def visible(self, p: Problem, b: int, t: int) -> int:
        length = int(load(p.seq_lens, torch.tensor(b, device=p.device)))
        n = max(length - p.q_len + t + 1, 0)
        return min(n, p.top_k) if p.is_sparse else n


@_planted(
    "unread-values-times-zero",
    "Only the scores are masked: the values in the rest of the last page are multiplied by 0, and 0 * NaN is NaN.",
    Case(lengths=(5, 9), heads=3, page_size=4, unread="nan"),
    Case(lengths=(6, 11), q_len=2, heads=3, page_size=4, unread="inf"),
    needs=("dense", "unread memory"),
)
class UnreadTimesZero(Careless):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        n = z.shape[1]
        if not p.is_sparse:
            unread = self.slots(p, b, t, math.ceil(n / p.page_size) * p.page_size)[n:]
            values = torch.cat([values, self.values(p, self.keys(p, unread))])
            z = torch.cat([z, torch.full((len(z), len(unread)), -math.inf, device=p.device)], dim=1)
        return super().part(p, b, t, z, values)


@_planted(
    "maximum-over-unread-keys",
    "The maximum is taken before the mask: the scores of the slots after the last key shift the exponents.",
    Case(lengths=(5, 9), heads=3, page_size=4, unread="nan"),
    Case(lengths=(6, 11), q_len=2, heads=3, page_size=4, unread="max"),
    needs=("dense", "unread memory"),
)
class MaximumOverUnread(Careless):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        n = z.shape[1]
        if p.is_sparse or n == 0:
            return super().part(p, b, t, z, values)
        page_end = self.slots(p, b, t, math.ceil(n / p.page_size) * p.page_size)
        top = self.scores(p, self.query(p, b, t), self.keys(p, page_end)).amax(dim=1)  # [H]
        weights = torch.exp2(z - top[:, None])  # [H, n]
        return State(weights @ values, weights.sum(dim=1), top)
