"""The contract as it is written, one query vector at a time. Slow, and meant to be read aloud."""

from __future__ import annotations

import math

import torch

from mla.problem import Problem
from mla.reference.precision import ieee_matmul


@torch.no_grad()
def decode_literal(problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Q, H, R] and lse [B, Q, H] (in `problem.lse_base`), computed and returned in `dtype`.

    Reads lengths, page ids and slots on the host. A page id outside the pool within a request's length raises
    IndexError here; the contract leaves such a row unspecified.
    """
    p = problem
    out = torch.zeros(p.batch, p.q_len, p.num_heads, p.kv_lora_rank, dtype=dtype, device=p.device)
    lse = torch.full((p.batch, p.q_len, p.num_heads), -math.inf, dtype=dtype, device=p.device)
    unit = math.log(2.0) if p.lse_base == "base2" else 1.0
    with ieee_matmul(p.device):
        for b in range(p.batch):
            for t in range(p.q_len):
                rows = [row(p, slot).to(dtype) for slot in visible_slots(p, b, t)]
                keys = torch.stack(rows) if rows else out.new_zeros(0, p.head_dim)  # [n, D]
                for h in range(p.num_heads):
                    sink = -math.inf if p.sinks is None else float(p.sinks[h])
                    natural = attend(p, p.query[b, t, h].to(dtype), keys, sink, out[b, t, h])
                    lse[b, t, h] = natural / unit
    return out, lse


def attend(problem: Problem, query: torch.Tensor, keys: torch.Tensor, sink: float, out: torch.Tensor) -> float:
    """One query vector [D] over its keys [n, D]: writes out [R] and returns the natural log-sum-exp."""
    if len(keys) == 0:
        return sink  # and out stays 0: the identity of merging, or the sink alone
    z = float(problem.bmm1_scale) * (keys @ query)  # [n]
    largest = max([*z.tolist(), sink])
    weights = torch.exp(z - largest)  # [n]
    denominator = weights.sum() + math.exp(sink - largest)
    out.copy_(float(problem.bmm2_scale) * (weights / denominator) @ keys[:, : problem.kv_lora_rank])
    return float(largest + torch.log(denominator))


def row(problem: Problem, slot: int) -> torch.Tensor:
    """[D] what a token slot of the pool stores."""
    return problem.kv_cache[slot // problem.page_size, slot % problem.page_size]


def visible_slots(problem: Problem, b: int, t: int) -> list[int]:
    """The token slots (page * P + offset) that query token t of request b attends to, in table order."""
    p = problem
    n = max(int(p.seq_lens[b]) - p.q_len + t + 1, 0)
    if p.is_sparse:
        pool = p.num_pages * p.page_size
        listed: list[int] = p.block_tables[b, t, : min(n, p.top_k)].tolist()
        return [slot for slot in listed if 0 <= slot < pool]
    slots = [int(p.block_tables[b, j // p.page_size]) * p.page_size + j % p.page_size for j in range(n)]
    for j, slot in enumerate(slots):
        if not 0 <= slot < p.num_pages * p.page_size:
            raise IndexError(
                f"token {j} of request {b} is in page {slot // p.page_size}, and the pool has {p.num_pages}"
            )
    return slots
