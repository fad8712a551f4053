"""The two scales, the base of the exponent, and factors that nobody asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch

from mla.checks import E4M3
from mla.problem import Problem
from mla.testing.case import SM_SCALE, Case
from mla.testing.emulate import LOG2E, Kernel, State
from mla.testing.faults.fault import planted
from mla.testing.judges import scale_tensors_are_read

_planted = partial(planted, "scaling")


@_planted(
    "bmm1-missing",
    "The scores are not multiplied by bmm1.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(9, 33), heads=2, page_size=16, bmm1=-0.07),
    needs=("bmm1 not 1",),
)
class NoBmm1(Kernel):
    def bmm1(self, p: Problem) -> float:
        return 1.0


@_planted(
    "bmm1-twice",
    "The scores are multiplied by bmm1 twice.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 40), heads=2, page_size=16, scores="one_hot", bmm1=0.25),
    needs=("bmm1 not 1",),
)
class Bmm1Twice(Kernel):
    def bmm1(self, p: Problem) -> float:
        return super().bmm1(p) ** 2


@_planted(
    "scale-from-the-head-dim",
    "1 / sqrt(192) is used in place of bmm1.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm1=0.05),
    Case(lengths=(6, 40), heads=2, page_size=16, bmm1=0.1352),
    needs=("bmm1 not 1 / sqrt(192)",),
)
class OwnScale(Kernel):
    def bmm1(self, p: Problem) -> float:
        return SM_SCALE


@_planted(
    "sign-of-bmm1-lost",
    "The absolute value of bmm1 is used.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm1=-0.07),
    Case(lengths=(6, 40), heads=2, page_size=16, scores="one_hot", bmm1=-0.25, scale_form="tensor"),
    needs=("bmm1 below 0",),
)
class SignLost(Kernel):
    def bmm1(self, p: Problem) -> float:
        return abs(super().bmm1(p))


@_planted(
    "scale-from-max-seq-len",
    "When max_seq_len is over 4096 the scores are scaled by its logarithm, as if it were the length.",
    Case(lengths=(5, 9), heads=3, page_size=4, max_slack=1 << 20),
    Case(lengths=(6, 40), q_len=2, heads=2, page_size=16, scores="peaked", max_slack=5000),
    needs=("max_seq_len over 4096",),
)
class ScaleFromBound(Kernel):
    def bmm1(self, p: Problem) -> float:
        return super().bmm1(p) * max(1.0, math.log(max(p.max_seq_len, 1)) / math.log(4096))


@_planted(
    "bmm1-in-bf16",
    "bmm1 is rounded to bf16 on its way to the kernel.",
    Case(lengths=(5, 9), heads=3, page_size=4, scores="peaked"),
    Case(lengths=(6, 40), heads=2, page_size=16, scores="one_hot", bmm1=0.6),
)
class Bmm1InBf16(Kernel):
    def bmm1(self, p: Problem) -> float:
        return float(torch.tensor(super().bmm1(p)).to(torch.bfloat16))


@_planted(
    "scale-of-0-taken-for-missing",
    "A scale of 0 is taken for one that was not given, and its default is used.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm1=0.0),
    Case(lengths=(5, 9), heads=3, page_size=4, bmm2=0.0),
    needs=("a scale of 0",),
)
class ZeroIsMissing(Kernel):
    def bmm1(self, p: Problem) -> float:
        return super().bmm1(p) or SM_SCALE

    def bmm2(self, p: Problem) -> float:
        return super().bmm2(p) or 1.0


@_planted(
    "log2e-forgotten",
    "The exponent is taken to base 2 of scores in natural units.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 40), heads=2, page_size=16, scores="one_hot", bmm1=0.25),
)
class NoLog2e(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(p, query, keys) / LOG2E


@_planted(
    "log2e-twice",
    "The scores are multiplied by log2(e) twice.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 40), heads=2, page_size=16, scores="one_hot", bmm1=0.25),
)
class Log2eTwice(Kernel):
    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return super().scores(p, query, keys) * LOG2E


@_planted(
    "bmm1-tensor-ignored",
    "A bmm1 that is a tensor is not read: 1 is used.",
    Case(lengths=(5, 9), heads=3, page_size=4, scale_form="tensor"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, scale_form="tensor4d", bmm1=0.1352),
    needs=("scale tensor", "bmm1 not 1"),
)
class Bmm1TensorIgnored(Kernel):
    def bmm1(self, p: Problem) -> float:
        return 1.0 if isinstance(p.bmm1_scale, torch.Tensor) else super().bmm1(p)


@_planted(
    "bmm2-tensor-ignored",
    "A bmm2 that is a tensor is not read: 1 is used.",
    Case(lengths=(5, 9), heads=3, page_size=4, scale_form="tensor", bmm2=3.0),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, scale_form="tensor4d", bmm2=-2.0),
    needs=("scale tensor", "bmm2 not 1"),
)
class Bmm2TensorIgnored(Kernel):
    def bmm2(self, p: Problem) -> float:
        return 1.0 if isinstance(p.bmm2_scale, torch.Tensor) else super().bmm2(p)


@_planted(
    "bmm1-tensor-taken-for-log2-units",
    "A bmm1 that is a tensor is taken to hold log2(e) already.",
    Case(lengths=(5, 9), heads=3, page_size=4, scale_form="tensor"),
    Case(lengths=(6, 40), heads=2, page_size=16, scale_form="tensor4d", scores="one_hot", bmm1=0.25),
    needs=("scale tensor",),
)
class TensorInLog2Units(Kernel):
    def bmm1(self, p: Problem) -> float:
        return super().bmm1(p) / (LOG2E if isinstance(p.bmm1_scale, torch.Tensor) else 1.0)


@_planted(
    "scale-tensors-read-once",
    "Scale tensors are read in the first call and never again.",
    Case(lengths=(5, 9), heads=3, page_size=4, scale_form="tensor", bmm1=0.1352, bmm2=3.0),
    Case(lengths=(9,), q_len=2, heads=3, page_size=4, scale_form="tensor4d"),
    needs=("scale tensor",),
    judge=scale_tensors_are_read,
)
@dataclass
class ScalesReadOnce(Kernel):
    known: dict[int, float] = field(default_factory=dict)

    def bmm1(self, p: Problem) -> float:
        return self.known.setdefault(1, super().bmm1(p))

    def bmm2(self, p: Problem) -> float:
        return self.known.setdefault(2, super().bmm2(p))


@_planted(
    "bmm2-missing",
    "The output is not multiplied by bmm2.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm2=0.5),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, bmm2=-2.0),
    needs=("bmm2 not 1",),
)
class NoBmm2(Kernel):
    def bmm2(self, p: Problem) -> float:
        return 1.0


@_planted(
    "bmm2-twice",
    "The output is multiplied by bmm2 twice.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm2=0.5),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, bmm2=3.0),
    needs=("bmm2 not 1",),
)
class Bmm2Twice(Kernel):
    def bmm2(self, p: Problem) -> float:
        return super().bmm2(p) ** 2


@_planted(
    "bmm2-in-the-scores",
    "The scores are multiplied by bmm1 * bmm2.",
    Case(lengths=(5, 9), heads=3, page_size=4, bmm2=0.5),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, bmm2=3.0),
    needs=("bmm2 not 1",),
)
class Bmm2InTheScores(Kernel):
    def bmm1(self, p: Problem) -> float:
        return super().bmm1(p) * self.bmm2(p)


@_planted(
    "scores-scaled-for-e4m3",
    "With an e4m3 cache the scores get a factor of their own, since such a cache is taken to need one.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="float8_e4m3fn", cache="float8_e4m3fn"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="bfloat16", cache="float8_e4m3fn", scores="peaked"),
    needs=("e4m3 cache",),
)
class ScaledForE4m3(Kernel):
    def bmm1(self, p: Problem) -> float:
        return super().bmm1(p) * (0.5 if p.kv_cache.dtype is E4M3 else 1.0)


@_planted(
    "weights-times-448-kept",
    "With an e4m3 cache the weights are scaled by 448 before they are rounded, and the sums are not scaled back.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="float8_e4m3fn", cache="float8_e4m3fn"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="float16", cache="float8_e4m3fn"),
    needs=("e4m3 cache",),
)
class Times448(Kernel):
    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        state = super().part(p, b, t, z, values)
        return state._replace(sums=state.sums * 448.0) if p.kv_cache.dtype is E4M3 else state
