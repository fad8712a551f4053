"""The contract as it is written, one query vector at a time. Slow, and meant to be read aloud."""

from __future__ import annotations

import math

import torch

from mla.problem import Problem


@torch.no_grad()
def decode_literal(problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Q, H, R] and lse [B, Q, H] (in `problem.lse_base`), computed and returned in `dtype`.

    Reads lengths, page ids and slots on the host. A page id outside the pool within a request's length raises
    IndexError here; the contract leaves such a row unspecified.
    """
    p = problem
    bmm1, bmm2 = float(p.bmm1_scale), float(p.bmm2_scale)
    out = torch.zeros(p.batch, p.q_len, p.num_heads, p.kv_lora_rank, dtype=dtype, device=p.device)
    lse = torch.full((p.batch, p.q_len, p.num_heads), -math.inf, dtype=dtype, device=p.device)
    for b in range(p.batch):
        for t in range(p.q_len):
            slots = visible_slots(p, b, t)
            keys = (
                torch.stack([row(p, slot).to(dtype) for slot in slots]) if slots else out.new_zeros(0, p.head_dim)
            )  # [n, D]
            for h in range(p.num_heads):
                sink = -math.inf if p.sinks is None else float(p.sinks[h])
                if not slots and sink == -math.inf:
                    continue  # no key and no sink: the identity of merging, already there
                z = bmm1 * (keys @ p.query[b, t, h].to(dtype))  # [n]
                largest = max([*z.tolist(), sink])
                weights = torch.exp(z - largest)  # [n]
                denominator = weights.sum() + math.exp(sink - largest)
                if slots:
                    out[b, t, h] = bmm2 * (weights / denominator) @ keys[:, : p.kv_lora_rank]
                natural = largest + torch.log(denominator)
                lse[b, t, h] = natural / math.log(2.0) if p.lse_base == "base2" else natural
    return out, lse


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
