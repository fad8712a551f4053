"""FlashInfer's `BatchMLAPagedAttentionWrapper` with backend "fa3", its Hopper kernel.

Get it: `pip install --no-deps flashinfer-python==0.6.0 'apache-tvm-ffi>=0.1.6,<0.2'` beside PyTorch; the first call of
a dtype compiles for half a minute and needs nvcc and ninja. Needs an sm_90 GPU.

    python -m mla check examples.flashinfer_fa3:decode --device cuda

Declared, from its docstring and its own tests (`test_deepseek_mla.py`): bfloat16 and float16, any page size, head count
and Q, strided queries and pools, int32 tables, NaN past a length, lse in both bases. Not declared: top-k, sinks, scales
on the device, scales of zero or less, and lengths below Q (the tests call them unsupported; length 0 they do cover).

Done here because the wrapper has no parameter for it: the table becomes a list of the pages in use; bmm2 multiplies the
output; given buffers are copied into, the output cast; a query or pool that does not begin at a multiple of 16 bytes is
copied. FlashInfer's minus infinity is -5e4; an lse below -3e4 is returned as -inf. `plan` reads lengths on the host.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from mla.testing import Profile

profile = Profile(
    pairs=(("bfloat16", "bfloat16"), ("float16", "float16")),
    sparse=False,
    sinks=False,
    scale_tensors=False,
    index_dtypes=("int32",),
    any_scale=False,
    short_rows=False,
    devices=("cuda",),
)


@functools.cache
def _wrapper(device: torch.device) -> Any:
    """One for all calls: it pins 8 MB of host memory."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device), backend="fa3")


def decode(
    *,
    query: torch.Tensor,  # [B, Q, H, D]
    kv_cache: torch.Tensor,  # [N, P, D] or [N, 1, P, D]
    workspace_buffer: torch.Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,  # [B, W]
    seq_lens: torch.Tensor,  # [B]
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """The call, by `plan` and `run`."""
    if sparse_mla_top_k or sinks is not None or isinstance(bmm1_scale, torch.Tensor):
        raise NotImplementedError("FlashInfer's fa3 kernel has no top-k list, no sinks and no scale on the device")
    batch, q_len, heads, _ = query.shape
    pool = _aligned(kv_cache if kv_cache.ndim == 3 else kv_cache.squeeze(1))
    page_size, rank = pool.shape[1], kv_lora_rank
    pages = (seq_lens + page_size - 1) // page_size  # [B]
    in_use = torch.arange(block_tables.shape[1], device=query.device) < pages[:, None]  # [B, W]
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=query.device)
    starts[1:] = pages.cumsum(0)
    wrapper = _wrapper(query.device)
    wrapper.plan(
        q_len * torch.arange(batch + 1, dtype=torch.int32, device=query.device),
        starts,
        block_tables[in_use],
        seq_lens.contiguous(),
        heads,
        rank,
        qk_rope_head_dim,
        page_size,
        q_len > 1,  # causal
        bmm1_scale,
        query.dtype,
        pool.dtype,
    )
    rows = _aligned(query).flatten(0, 1)  # [B * Q, H, D]
    result, logs = wrapper.run(
        rows[..., :rank],
        rows[..., rank:],
        pool[..., :rank],
        pool[..., rank:],
        return_lse=True,
        return_lse_base_on_e=return_lse_base == "basee",
    )  # [B * Q, H, R], [B * Q, H]
    logs = torch.where(logs < -3e4, -math.inf, logs)
    if out is None:
        out = torch.empty(batch, q_len, heads, rank, dtype=torch.bfloat16, device=query.device)
    out.copy_((bmm2_scale * result.float()).reshape(out.shape))
    if lse is None:
        lse = torch.empty_like(logs)
    lse.copy_(logs.view(lse.shape))
    return (out, lse) if return_lse else out


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
