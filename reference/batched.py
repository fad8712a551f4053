"""The same meaning for all heads of a query token at once: what `backend="reference"` runs.

Each query token is computed alone and only from the keys that it sees. So a row's bits depend on nothing else: not on
its batch mates, not on max_seq_len, not on what lies in slots that it may not read, and a NaN that one token sees
cannot reach an earlier token of the same request. Keys come in blocks of `KEY_BLOCK`, gathered first and widened after:
the cost is what the lengths ask for, whatever the pool's size, and memory is bounded by one block.

Roundings that a kernel makes and this does not: the softmax weights to bf16 or e4m3 before they meet the values,
partial results of split keys, the query after scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from mla.problem import Problem
from mla.reference.precision import ieee_matmul

KEY_BLOCK = 2048


@torch.no_grad()
def decode(problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Q, H, R] and lse [B, Q, H] (in `problem.lse_base`), computed and returned in `dtype`.

    On a CPU the lengths bound the work. Elsewhere they stay on the device, with no host sync, and the table's width
    bounds the work. A dense row that sees a page outside the pool, or past its table, is NaN.
    """
    p = problem
    out = torch.empty(p.batch, p.q_len, p.num_heads, p.kv_lora_rank, dtype=dtype, device=p.device)
    lse = torch.empty(p.batch, p.q_len, p.num_heads, dtype=dtype, device=p.device)
    with ieee_matmul(p.device):
        for b in range(p.batch):
            for t in range(p.q_len):
                out[b, t], lse[b, t] = _attend(p, b, t, dtype)
    return out, lse


def _attend(p: Problem, b: int, t: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token: out [H, R] and lse [H]."""
    query = p.query[b, t].to(dtype)  # [H, D]
    if p.sinks is None:
        largest = torch.full((p.num_heads,), -math.inf, dtype=dtype, device=p.device)
    else:
        largest = p.sinks.to(dtype)  # a sink is a key with this score and no value
    total = torch.where(largest > -math.inf, 1.0, 0.0).to(dtype)  # [H], sum of exp(z - largest) so far
    sums = torch.zeros(p.num_heads, p.kv_lora_rank, dtype=dtype, device=p.device)  # [H, R]
    seen = torch.zeros((), dtype=torch.int64, device=p.device)
    tiny = torch.finfo(dtype).tiny
    for keys, visible in _key_blocks(p, b, t, dtype):  # [T, D], [T]
        z = p.bmm1_scale * (query @ keys.T)  # [H, T]
        z = z.masked_fill(~visible, -math.inf)
        higher = torch.maximum(largest, z.amax(dim=-1))
        shift = torch.where(higher == -math.inf, 0.0, higher)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
        kept = torch.exp(largest - shift)
        weights = torch.exp(z - shift[:, None])
        weights = torch.where(weights < tiny, 0.0, weights)  # subnormals say nothing and slow a CPU down tenfold
        total = total * kept + weights.sum(dim=-1)
        sums = sums * kept[:, None] + weights @ keys[:, : p.kv_lora_rank]
        largest = higher
        seen = seen + visible.sum()
    out = torch.where(seen == 0, 0.0, p.bmm2_scale * (sums / total[:, None]))
    if p.lse_base == "base2":
        return out, largest * math.log2(math.e) + torch.log2(total)
    return out, largest + torch.log(total)


def _key_blocks(p: Problem, b: int, t: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(keys [T, D], visible [T]) block by block. A key that is not visible is all zero, whatever its slot holds."""
    n = p.seq_lens[b].to(torch.int64) + (t + 1 - p.q_len)  # stays on the device
    bound = p.top_k if p.is_sparse else p.table_width * p.page_size
    if p.device.type == "cpu":
        bound = min(bound, max(int(n), 0))
    else:
        bound = math.ceil(bound / KEY_BLOCK) * KEY_BLOCK  # whole blocks, so that no bit depends on the table's width
    for start in range(0, bound, KEY_BLOCK):
        position = torch.arange(start, min(start + KEY_BLOCK, bound), device=p.device)
        within = position < n
        page, offset, in_pool = _locate(p, b, t, position)
        keys = _gather(p, page, offset).to(dtype)  # [T, D]
        if p.is_sparse:
            visible = within & in_pool & (position < p.top_k)
            yield torch.where(visible[:, None], keys, 0.0), visible
        else:
            known = torch.where(in_pool[:, None], keys, math.nan)
            yield torch.where(within[:, None], known, 0.0), within
    if not p.is_sparse:
        yield from _past_the_table(p, n, dtype)


def _past_the_table(p: Problem, n: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One more key, NaN, that is seen only by a row whose length the table cannot hold: never silently truncated."""
    beyond = (n > p.table_width * p.page_size).reshape(1)
    if p.device.type != "cpu" or bool(beyond):
        nan = torch.full((1, p.head_dim), math.nan, dtype=dtype, device=p.device)
        yield torch.where(beyond[:, None], nan, 0.0), beyond


def _locate(p: Problem, b: int, t: int, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(page, offset, whether the pool has it) of the keys at these positions; page and offset are safe to read."""
    if p.is_sparse:
        slot = p.block_tables[b, t][position.clamp(max=p.top_k - 1)].to(torch.int64)
        in_pool = (slot >= 0) & (slot < p.num_pages * p.page_size)
        slot = torch.where(in_pool, slot, 0)
        return slot // p.page_size, slot % p.page_size, in_pool
    column = position // p.page_size
    page = p.block_tables[b][column.clamp(max=p.table_width - 1)].to(torch.int64)
    in_pool = (page >= 0) & (page < p.num_pages) & (column < p.table_width)
    return torch.where(in_pool, page, 0), position % p.page_size, in_pool


def _gather(p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The cache rows at (page, offset), [T, D] in the cache's own dtype."""
    if p.num_pages == 0:
        return torch.zeros(page.shape[0], p.head_dim, dtype=p.kv_cache.dtype, device=p.device)
    return p.kv_cache[page, offset]
