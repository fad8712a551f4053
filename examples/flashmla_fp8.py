"""FlashMLA's dense decode kernel for Hopper with e4m3 queries and pools.

Get it: `pip install --no-deps sgl-flash-mla==1.0.0`, as for `flashmla.py`. The kernel came to FlashMLA as pull request
54 and lives on in the forks of vLLM and SGLang; both serve with it.

    python -m mla check examples.flashmla_fp8:decode --device cuda

Declared: pages of 64 alone, any head count and Q, int32 tables and lengths, strided queries and pools, any id past a
table's end, bmm1 on the device (it goes in as `descale_q`, which the kernel reads). Not declared: top-k, sinks, and
rows without a key: for a length of 0 the kernel reads the table entry before the row and may fault (vllm#33664).

Done here because the kernel has no parameter for it: bmm2 multiplies the output (`descale_k` would scale it, and the
scores with it); the bfloat16 output is cast and copied into buffers that were given; a query or pool that does not
begin at a multiple of 16 bytes is copied (the kernel's loads need that; engines have it).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla.testing import Profile

profile = Profile(
    pairs=(("float8_e4m3fn", "float8_e4m3fn"),),
    sparse=False,
    sinks=False,
    page_sizes=(64,),
    index_dtypes=("int32",),
    any_scale=False,
    empty_rows=False,
    short_rows=False,
    devices=("cuda",),
)


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
    """The call, by `flash_mla_with_kvcache` with descale factors."""
    from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_decoding_metadata

    if sparse_mla_top_k or sinks is not None:
        raise NotImplementedError("FlashMLA's dense e4m3 kernel has no top-k list and no sinks")
    _, q_len, heads, _ = query.shape
    pool = kv_cache if kv_cache.ndim == 3 else kv_cache.squeeze(1)
    lengths = seq_lens.contiguous()
    plan = FlashMLASchedMeta()
    plan.tile_scheduler_metadata, plan.num_splits = get_mla_decoding_metadata(
        lengths, q_len * heads, 1, is_fp8_kvcache=True, use_legacy=True
    )
    result, natural = flash_mla_with_kvcache(
        _aligned(query),
        _aligned(pool).unsqueeze(2),  # [N, P, 1, D]
        block_tables.clone(memory_format=torch.contiguous_format),
        lengths,
        kv_lora_rank,
        plan,
        softmax_scale=1.0,
        causal=True,
        is_fp8_kvcache=True,
        use_legacy=True,
        descale_q=torch.as_tensor(bmm1_scale, dtype=torch.float32, device=query.device).reshape(1),
        descale_k=torch.ones(1, device=query.device),
    )  # [B, Q, H, R], [B, H, Q]
    return _answer(result, natural.transpose(1, 2), bmm2_scale, out, return_lse, lse, return_lse_base)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _answer(
    result: torch.Tensor,  # [B, Q, H, R]
    natural: torch.Tensor,  # [B, Q, H]
    bmm2_scale: float | torch.Tensor,
    out: torch.Tensor | None,
    return_lse: bool,
    lse: torch.Tensor | None,
    base: str | None,
) -> Any:
    """Scale, cast and copy to where the call wants it."""
    if out is None:
        out = torch.empty(result.shape, dtype=torch.bfloat16, device=result.device)
    out.copy_((bmm2_scale * result.float()).reshape(out.shape))
    if lse is None:
        lse = natural.new_empty(natural.shape[0] * natural.shape[1], natural.shape[2])
    lse.copy_((natural if base == "basee" else natural / math.log(2)).reshape(lse.shape))
    return (out, lse) if return_lse else out
