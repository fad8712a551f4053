"""The output: rows without keys, given buffers, dtypes and strides."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from mla.checks import E4M3
from mla.problem import Problem
from mla.testing.case import Case
from mla.testing.emulate import Kernel, State
from mla.testing.faults.fault import planted
from mla.testing.faults.raw import Careless, store
from mla.testing.faults.rows import Unwritten

_planted = partial(planted, "outputs")


@_planted(
    "empty-row-not-written",
    "The kernel returns before the store when a row has no key.",
    Case(lengths=(0, 9), heads=3, page_size=4),
    Case(lengths=(2, 7), q_len=4, heads=2, page_size=4, out="bfloat16"),
    needs=("empty row",),
)
class EmptyNotWritten(Unwritten):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        lse[b, t] = row_lse
        if len(self.slots(p, b, t, self.visible(p, b, t))):
            out[b, t] = row.to(out.dtype)


@_planted(
    "empty-row-divides-by-zero",
    "A row without keys divides 0 by 0.",
    Case(lengths=(0, 9), heads=3, page_size=4, lse="none"),
    Case(lengths=(20, 9), q_len=2, heads=2, page_size=4, top_k=8, slots="all_holes"),
    needs=("empty row",),
)
class EmptyDivides(Kernel):
    def result(self, p: Problem, b: int, t: int, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        return self.bmm2(p) * state.sums / state.total[:, None], self.log(p, state)


@_planted(
    "empty-row-is-a-mean",
    "When every key is masked all weigh the same, and a row without keys is the mean of the values at hand.",
    Case(lengths=(2, 9), q_len=4, heads=3, page_size=4),
    Case(lengths=(0, 9), heads=2, page_size=4),
    needs=("empty row",),
)
class EmptyIsMean(Careless):
    def result(self, p: Problem, b: int, t: int, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().result(p, b, t, state)
        hidden = self.slots(p, b, t, max(self.visible(p, b, p.q_len - 1), 1))
        if not len(hidden):
            hidden = torch.zeros(1, dtype=torch.int64, device=p.device)
        mean = self.values(p, self.keys(p, hidden)).mean(dim=0)
        return torch.where((state.total == 0)[:, None], mean, out), lse


@_planted(
    "output-through-e4m3",
    "The output is rounded to e4m3 before it is stored.",
    Case(lengths=(5, 9), heads=3, page_size=4),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="float16", cache="float16", out="float32"),
)
class ThroughE4m3(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        super().store(p, out, lse, b, t, row.to(E4M3).to(torch.float32), row_lse)


@_planted(
    "output-through-bf16",
    "The output is rounded to bf16 before it is stored in a finer format.",
    Case(lengths=(5, 9), heads=3, page_size=4, query="float32", cache="float32", out="float32"),
    Case(lengths=(1, 2), heads=8, page_size=4, query="float16", cache="float16", out="float32"),
    needs=("given out",),
)
class ThroughBf16(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        super().store(p, out, lse, b, t, row.to(torch.bfloat16).to(torch.float32), row_lse)


@_planted(
    "bf16-bits-in-an-fp16-output",
    "An output of 16 bits is written as bf16, whatever its dtype.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="float16"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, query="float16", cache="float16", out="float16"),
    needs=("out in fp16",),
)
class Bf16Bits(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        half = out.dtype is torch.float16
        super().store(p, out, lse, b, t, row.to(torch.bfloat16).view(torch.float16) if half else row, row_lse)


@_planted(
    "given-output-always-bf16",
    "The result is bf16 although the given output has another dtype, and replaces it.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="float32"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, out="float16"),
    needs=("given out",),
)
class AlwaysBf16(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        given = arguments.get("out")
        if given is not None and given.dtype is not torch.bfloat16:
            arguments["out"] = None
        return super().__call__(**arguments)


@_planted(
    "given-output-replaced",
    "A given output is left as it is, and a new tensor is returned.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="bfloat16"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, out="float32"),
    needs=("given out",),
)
class OutputReplaced(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        given = arguments.get("out")
        if given is not None:
            arguments["out"] = torch.empty_like(given, memory_format=torch.contiguous_format)
        return super().__call__(**arguments)


@_planted(
    "copy-of-the-given-output-returned",
    "A given output is filled, and a copy of it is returned.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="bfloat16"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, out="float32", lse="none"),
    needs=("given out",),
)
class CopyReturned(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        return (result[0].clone(), result[1]) if isinstance(result, tuple) else result.clone()


@_planted(
    "result-added-to-the-given-output",
    "The result is added to what a given output holds.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="bfloat16"),
    Case(lengths=(0, 11), heads=2, page_size=4, out="float32"),
    needs=("given out",),
)
class AddedToOutput(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        super().store(p, out, lse, b, t, row if p.out is None else row + out[b, t].to(torch.float32), row_lse)


@_planted(
    "output-strides-ignored",
    "A given output is written as if it were packed.",
    Case(lengths=(5, 9), heads=3, page_size=4, out="bfloat16", out_layout="sliced"),
    Case(lengths=(6, 11), q_len=2, heads=2, page_size=4, out="float32", out_layout="transposed"),
    needs=("strided out",),
)
class OutputPacked(Kernel):
    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        store(out, (b * p.q_len + t) * row.numel(), row.flatten())
        lse[b, t] = row_lse


@_planted(
    "no-request-taken-for-one",
    "A batch of no requests gives a row.",
    Case(lengths=(), heads=3, page_size=4),
    Case(lengths=(), q_len=2, heads=2, page_size=16),
    needs=("no request",),
)
class NoRequest(Kernel):
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = super().__call__(**arguments)
        if len(arguments["query"]):
            return result
        out, lse = result if isinstance(result, tuple) else (result, None)
        row = torch.full((1, *out.shape[1:]), math.nan, dtype=out.dtype, device=out.device)
        return row if lse is None else (row, lse)
