"""The softmax itself: its maximum, its sums, and the numbers they are kept in."""

from __future__ import annotations

import math
from functools import partial

import torch

from mla.checks import E4M3
from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel, State
from mla.testing.faults.fault import planted

_planted = partial(planted, "softmax")


@_planted(
    "no-maximum-subtracted",
    "Scores are exponentiated as they are, and large ones overflow.",
    Case(lengths=(5, 9), heads=3, page_size=4, scores="peaked", bmm1=1.0),
    Case(lengths=(60,), heads=2, page_size=16, scores="one_hot", bmm1=10.0),
)
class NoMaximum(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        if not z.shape[1]:
            return super().part(p, b, t, z, values)
        weights = torch.exp2(z)
        return State(self.rounded(weights) @ values, weights.sum(dim=1), torch.zeros(len(z), device=p.device))


@_planted(
    "sums-not-rescaled",
    "When a later block raises the maximum, the sums of the blocks before it are not scaled down to it.",
    Case(lengths=(40, 33), heads=3, page_size=16),
    Case(lengths=(60,), heads=2, page_size=16, scores="one_hot", bmm1=0.05),
    block=16,
)
class SumsNotRescaled(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        sums = torch.zeros(len(z), p.kv_lora_rank, device=p.device)
        total = torch.zeros(len(z), device=p.device)
        top = torch.full((len(z),), -math.inf, device=p.device)
        for start in range(0, z.shape[1], self.block):
            stop = start + self.block
            higher = torch.maximum(top, z[:, start:stop].amax(dim=1))
            weights = torch.exp2(z[:, start:stop] - higher[:, None])
            total = total * torch.exp2(top - higher) + weights.sum(dim=1)
            sums = sums + self.rounded(weights) @ values[start:stop]
            top = higher
        return State(sums, total, top)


@_planted(
    "total-not-rescaled",
    "When a later block raises the maximum, the total of the weights before it is not scaled down to it.",
    Case(lengths=(40, 33), heads=3, page_size=16),
    Case(lengths=(60,), heads=2, page_size=16, scores="one_hot", bmm1=0.05),
    block=16,
)
class TotalNotRescaled(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        state = super().part(p, b, t, z, values)
        total = torch.zeros(len(z), device=p.device)
        top = torch.full((len(z),), -math.inf, device=p.device)
        for start in range(0, z.shape[1], self.block):
            block = z[:, start : start + self.block]
            top = torch.maximum(top, block.amax(dim=1))
            total = total + torch.exp2(block - top[:, None]).sum(dim=1)
        return state._replace(total=total)


@_planted(
    "maximum-of-the-first-block-kept",
    "The maximum of the first block serves for all, and larger scores after it overflow.",
    Case(lengths=(60,), heads=2, page_size=16, scores="one_hot", bmm1=10.0),
    Case(lengths=(60,), heads=3, page_size=4, scores="one_hot", bmm1=4.0, query="float16", cache="float16"),
    block=16,
)
class FirstMaximumKept(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        if not z.shape[1]:
            return super().part(p, b, t, z, values)
        top = z[:, : self.block].amax(dim=1)
        weights = torch.exp2(z - top[:, None])
        return State(self.rounded(weights) @ values, weights.sum(dim=1), top)


@_planted(
    "scores-in-fp16",
    "The products of query and key are kept in fp16: they overflow beyond 65504 and are rounded below.",
    Case(lengths=(9, 20), heads=3, page_size=4, scores="peaked", values="position"),
    Case(lengths=(9, 33), heads=2, page_size=16, scores="peaked", bmm1=0.5),
)
class ScoresInFp16(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        raw = super().scores(p, query, keys)
        scale = self.bmm1(p) or 1.0
        return (raw / scale).to(torch.float16).to(torch.float32) * scale


@_planted(
    "scores-in-bf16",
    "The scores are rounded to bf16 before the softmax.",
    Case(lengths=(5, 9), heads=3, page_size=4, scores="peaked"),
    Case(lengths=(9, 33), q_len=2, heads=2, page_size=16, scores="peaked", query="float16", cache="float16"),
)
class ScoresInBf16(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(p, query, keys).to(torch.bfloat16).to(torch.float32)


@_planted(
    "sums-in-bf16",
    "Each key's weighted value is added to a bf16 sum, which stops growing.",
    Case(lengths=(400,), heads=1, page_size=64, scores="equal", values="ones"),
    Case(lengths=(700,), heads=2, page_size=64, scores="equal", values="position"),
)
class SumsInBf16(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        if not z.shape[1]:
            return super().part(p, b, t, z, values)
        top = z.amax(dim=1)
        weights = torch.exp2(z - top[:, None])
        sums = torch.zeros(len(z), p.kv_lora_rank, dtype=torch.bfloat16, device=p.device)
        for weight, value in zip(weights.T, values, strict=True):  # [H], [R]
            sums += (weight[:, None] * value).to(torch.bfloat16)
        return State(sums.to(torch.float32), weights.sum(dim=1), top)


@_planted(
    "total-in-bf16",
    "Each key's weight is added to a bf16 total, which stops growing.",
    Case(lengths=(400,), heads=1, page_size=64, scores="equal", values="ones"),
    Case(lengths=(700,), heads=2, page_size=64, scores="flat"),
)
class TotalInBf16(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        if not z.shape[1]:
            return super().part(p, b, t, z, values)
        top = z.amax(dim=1)
        weights = torch.exp2(z - top[:, None])
        total = torch.zeros(len(z), dtype=torch.bfloat16, device=p.device)
        for weight in weights.T:  # [H]
            total += weight.to(torch.bfloat16)
        return State(self.rounded(weights) @ values, total.to(torch.float32), top)


@_planted(
    "weights-in-e4m3-for-a-wider-cache",
    "The softmax weights are rounded to e4m3, whatever the cache's format.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="float16", cache="float16"),
    needs=("cache of 16 bits or more",),
)
class CoarseWeights(Kernel):
    def rounded(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.to(E4M3).to(torch.float32)


@_planted(
    "query-rounded-to-e4m3",
    "A wider query is rounded to e4m3 to meet an e4m3 cache.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="bfloat16", cache="float8_e4m3fn", scores="peaked"),
    Case(lengths=(6, 30), q_len=2, heads=2, page_size=4, query="float16", cache="float8_e4m3fn", scores="peaked"),
    needs=("wide query, e4m3 cache",),
)
class QueryInE4m3(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        narrow = query.to(E4M3).to(torch.float32) if p.kv_cache.dtype is E4M3 else query
        return super().scores(p, narrow, keys)
