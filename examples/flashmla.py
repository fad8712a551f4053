"""FlashMLA's dense decode kernel for Hopper, in bfloat16 and float16.

Get it: `pip install --no-deps sgl-flash-mla==1.0.0`: DeepSeek's FlashMLA as SGLang packages it, with the Hopper kernels
that upstream dropped behind `use_legacy=True`. Needs an sm_90 GPU, CUDA 13.1 libraries and PyTorch 2.10 or newer.

    python -m mla check examples.flashmla:decode --device cuda

Declared, from its README, its checks and its own tests (`test_flash_mla_dense_decoding.py`): pages of 64 alone, any
head count and Q, int32 tables and lengths, strided queries and pools, NaN past a length, any id past a table's end,
rows without a key (lse is +inf there and -inf here). Not declared: top-k, sinks, scales on the device.

Done here because the kernel has no parameter for it: bmm2 multiplies the output; given buffers are copied into, the
output cast; a query or pool that does not begin at a multiple of 16 bytes is copied (TMA needs that; engines have it).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla.testing import Profile

profile = Profile(
    pairs=(("bfloat16", "bfloat16"), ("float16", "float16")),
    sparse=False,
    sinks=False,
    page_sizes=(64,),
    scale_tensors=False,
    index_dtypes=("int32",),
    any_scale=False,
    empty_pools=False,
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
    """The call, by `flash_mla_with_kvcache`."""
    if sparse_mla_top_k or sinks is not None or isinstance(bmm1_scale, torch.Tensor):
        raise NotImplementedError("FlashMLA's dense kernel has no top-k list, no sinks and no scale on the device")
    if len(query):
        from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache

        pool = kv_cache if kv_cache.ndim == 3 else kv_cache.squeeze(1)
        result, natural = flash_mla_with_kvcache(
            _aligned(query),
            _aligned(pool).unsqueeze(2),  # [N, P, 1, D]
            block_tables.clone(memory_format=torch.contiguous_format),
            seq_lens.contiguous(),
            kv_lora_rank,
            FlashMLASchedMeta(),
            softmax_scale=bmm1_scale,
            causal=True,
            use_legacy=True,
        )  # [B, Q, H, R], [B, H, Q]
        natural = torch.where(natural == math.inf, -math.inf, natural).transpose(1, 2)
    else:  # the kernel refuses an empty batch
        result, natural = query[..., :kv_lora_rank], query[..., 0].float()
    return _answer(result, natural, bmm2_scale, out, return_lse, lse, return_lse_base)


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
