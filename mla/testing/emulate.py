"""An honest kernel in PyTorch, step by step: what kernels round, this rounds, and it shows where a fault can sit.

It has the signature of the call (keywords only), so the suite can judge it like any kernel. Its steps are methods; the
planted faults of `mla.testing.faults` each override one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mla.checks import E4M3
from mla.problem import Problem
from mla.reference.precision import ieee_matmul

LOG2E = math.log2(math.e)


class State(NamedTuple):
    """A partial result in the log2 domain: sums [H, R] of 2^(z - top) * value, total [H], top [H]."""

    sums: torch.Tensor
    total: torch.Tensor
    top: torch.Tensor


@dataclass
class Kernel:
    """Split-key decode with online softmax, as a GPU does it.

    Attributes:
        weights: what the softmax weights are rounded to before they meet the values: "float32", "bfloat16", "float16",
            "e4m3", or "e4m3x448" (scaled to the whole range first).
        splits: how many parts the keys of a row are dealt into; parts may be empty.
        partials: dtype of each part's result before merging.
        block: keys per step of the online softmax.
    """

    weights: str = "float32"
    splits: int = 1
    partials: torch.dtype = torch.float32
    block: int = 64

    @torch.no_grad()
    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        arguments.pop("backend", None)
        given_out, given_lse = arguments.get("out"), arguments.get("lse")
        p = Problem.from_call(**arguments)
        out = given_out if given_out is not None else self.new_out(p)
        lse = given_lse if given_lse is not None else torch.empty(p.batch * p.q_len, p.num_heads, device=p.device)
        out_view = p.out if p.out is not None else out
        lse_view = p.lse if p.lse is not None else lse.view(p.batch, p.q_len, p.num_heads)
        with ieee_matmul(p.device):
            for b in range(p.batch):
                for t in range(p.q_len):
                    self.store(p, out_view, lse_view, b, t, *self.row(p, b, t))
        return (out, lse) if arguments.get("return_lse") else out

    def new_out(self, p: Problem) -> torch.Tensor:
        """The output, when none is given."""
        return torch.empty(p.batch, p.q_len, p.num_heads, p.kv_lora_rank, dtype=p.out_dtype, device=p.device)

    def row(self, p: Problem, b: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One query token: out [H, R] and lse [H], both fp32, lse in the problem's base."""
        slots = self.slots(p, b, t, self.visible(p, b, t))  # [n]
        keys = self.keys(p, slots)  # [n, D]
        z = self.scores(p, self.query(p, b, t), keys)  # [H, n], log2 domain
        parts = [
            self.part(p, b, t, z[:, start:stop], self.values(p, keys[start:stop]))
            for start, stop in self.bounds(p, len(slots))
        ]
        state = self.with_sink(p, self.merge(p, parts))
        return self.result(p, b, t, state)

    def visible(self, p: Problem, b: int, t: int) -> int:
        """How many keys (or list entries) this token sees."""
        n = max(int(p.seq_lens[b]) - p.q_len + t + 1, 0)
        return min(n, p.top_k) if p.is_sparse else n

    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        """[n'] the token slots of those keys, holes taken out."""
        if p.is_sparse:
            listed = p.block_tables[b, t, :n].to(torch.int64)
            return listed[(listed >= 0) & (listed < p.num_pages * p.page_size)]
        position = torch.arange(n, device=p.device)
        pages = p.block_tables[b, position // p.page_size].to(torch.int64)
        return pages * p.page_size + position % p.page_size

    def keys(self, p: Problem, slots: torch.Tensor) -> torch.Tensor:
        """[n, D] fp32 what those slots store."""
        if p.num_pages == 0:
            return torch.zeros(0, p.head_dim, device=p.device)
        return p.kv_cache[slots // p.page_size, slots % p.page_size].to(torch.float32)

    def values(self, p: Problem, keys: torch.Tensor) -> torch.Tensor:
        """[n, R] the values that belong to keys."""
        return keys[:, : p.kv_lora_rank]

    def query(self, p: Problem, b: int, t: int) -> torch.Tensor:
        """[H, D] fp32."""
        return p.query[b, t].to(torch.float32)

    def scores(self, p: Problem, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[H, n] in the log2 domain."""
        return (self.bmm1(p) * LOG2E) * (query @ keys.T)

    def bmm1(self, p: Problem) -> float:
        """What the scores are multiplied by."""
        return float(p.bmm1_scale)

    def bmm2(self, p: Problem) -> float:
        """What the output is multiplied by."""
        return float(p.bmm2_scale)

    def bounds(self, p: Problem, n: int) -> list[tuple[int, int]]:
        """(start, stop) of each part; trailing ones may be empty."""
        size = math.ceil(n / self.splits) if n else 0
        return [(min(i * size, n), min((i + 1) * size, n)) for i in range(self.splits)]

    def part(self, p: Problem, b: int, t: int, z: torch.Tensor, values: torch.Tensor) -> State:
        """Online softmax over one part, block by block."""
        heads = z.shape[0]
        sums = torch.zeros(heads, p.kv_lora_rank, device=p.device)
        total = torch.zeros(heads, device=p.device)
        top = torch.full((heads,), -math.inf, device=p.device)
        for start in range(0, z.shape[1], self.block):
            block, block_values = z[:, start : start + self.block], values[start : start + self.block]
            higher = torch.maximum(top, block.amax(dim=1))
            kept = torch.exp2(top - higher)
            weights = torch.exp2(block - higher[:, None])
            total = total * kept + weights.sum(dim=1)
            sums = sums * kept[:, None] + self.rounded(weights) @ block_values
            top = higher
        if total.numel() and z.shape[1]:
            sums = (sums / total[:, None]).to(self.partials).to(torch.float32) * total[:, None]
        return State(sums, total, top)

    def rounded(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights as the tensor core sees them."""
        if self.weights == "e4m3":
            return weights.to(E4M3).to(torch.float32)
        if self.weights == "e4m3x448":
            return (448.0 * weights).to(E4M3).to(torch.float32) / 448.0
        dtype: torch.dtype = getattr(torch, self.weights)
        return weights.to(dtype).to(torch.float32)

    def merge(self, p: Problem, parts: list[State]) -> State:
        """All parts as one; an empty part has top = -inf and adds nothing."""
        tops = torch.stack([part.top for part in parts])  # [S, H]
        top = tops.amax(dim=0)
        shift = torch.where(top == -math.inf, 0.0, top)
        factors = torch.exp2(tops - shift)  # [S, H]
        sums = sum(
            (f[:, None] * part.sums for f, part in zip(factors, parts, strict=True)), torch.zeros_like(parts[0].sums)
        )
        total = sum((f * part.total for f, part in zip(factors, parts, strict=True)), torch.zeros_like(top))
        return State(sums, total, top)

    def with_sink(self, p: Problem, state: State) -> State:
        """The sink joins the denominator, once per row."""
        if p.sinks is None:
            return state
        sink = p.sinks * LOG2E
        top = torch.maximum(state.top, sink)
        shift = torch.where(top == -math.inf, 0.0, top)
        kept = torch.exp2(state.top - shift)
        return State(state.sums * kept[:, None], state.total * kept + torch.exp2(sink - shift), top)

    def result(self, p: Problem, b: int, t: int, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise: out [H, R], lse [H]."""
        empty = (state.total == 0)[:, None]
        out = torch.where(empty, 0.0, self.bmm2(p) * state.sums / state.total[:, None])
        return out, self.log(p, state)

    def log(self, p: Problem, state: State) -> torch.Tensor:
        """[H] the log-sum-exp in the problem's base."""
        base2 = state.top + torch.log2(state.total)
        return base2 if p.lse_base == "base2" else base2 / LOG2E

    def store(
        self, p: Problem, out: torch.Tensor, lse: torch.Tensor, b: int, t: int, row: torch.Tensor, row_lse: torch.Tensor
    ) -> None:
        """Write one row."""
        out[b, t] = row.to(out.dtype)
        lse[b, t] = row_lse


def honest(cache: str, splits: int = 5) -> dict[str, Kernel]:
    """The honest ways to compute a problem: each rounds what some published kernel rounds, and nothing else.

    Args:
        cache: the cache's dtype name.
        splits: how many parts the keys of a row are dealt into, where a way splits.

    Returns:
        name -> a kernel with the signature of the call.
    """
    ways = {
        "fp32 weights": Kernel(),
        "fp32 weights, splits merged in fp32": Kernel(splits=splits, block=16),
    }
    if cache == "bfloat16":
        ways["bf16 weights"] = Kernel("bfloat16")
        ways["bf16 weights, bf16 partials"] = Kernel("bfloat16", splits=splits, partials=torch.bfloat16, block=32)
        ways["bf16 weights, bf16 partials, 32 splits"] = Kernel("bfloat16", splits=32, partials=torch.bfloat16)
    if cache == "float16":
        ways["fp16 weights"] = Kernel("float16")
        ways["fp16 weights, fp16 partials"] = Kernel("float16", splits=splits, partials=torch.float16)
    if cache == "float8_e4m3fn":
        ways["e4m3 weights"] = Kernel("e4m3")
        ways["e4m3 weights, scaled by 448"] = Kernel("e4m3x448", block=128)
        ways["e4m3 weights, bf16 partials"] = Kernel("e4m3", splits=splits, partials=torch.bfloat16)
        ways["bf16 weights"] = Kernel("bfloat16", splits=splits)
    return ways
