"""vLLM's Triton decode kernel, `decode_attention_fwd`, called as its TRITON_MLA backend calls it.

Get it: `pip install vllm==0.33.0`, or the one file `vllm/v1/attention/ops/triton_decode_attention.py` out of that wheel
beside stubs of `vllm.platforms` and `vllm.triton_utils` (see README.md). Any GPU that Triton compiles for.

    python -m mla check examples.vllm_triton:decode --device cuda

Declared, from its docstring and the backend around it: bfloat16 and float16 queries, e4m3 pools under them, any page
size, head count and Q, strided pools, int32 tables and lengths. Not declared: top-k, sinks, scales on the device, rows
without a key (the kernel divides 0 by 0 there, and the engine throws such rows away).

Done here, as the backend does it: a request of Q tokens becomes Q rows with a length each; the number of splits follows
max_seq_len. The kernel has no bmm2: it multiplies the output. Its lse is natural; given buffers are copied into.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla.testing import Profile

profile = Profile(
    pairs=(
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e4m3fn"),
    ),
    sparse=False,
    sinks=False,
    scale_tensors=False,
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
    """The call, by `decode_attention_fwd`."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    if sparse_mla_top_k or sinks is not None or isinstance(bmm1_scale, torch.Tensor):
        raise NotImplementedError("vLLM's Triton kernel has no top-k list, no sinks and no scale on the device")
    batch, q_len, heads, _ = query.shape
    pool = (kv_cache if kv_cache.ndim == 3 else kv_cache.squeeze(1)).unsqueeze(2)  # [N, P, 1, D]
    lengths = (seq_lens[:, None] + torch.arange(1 - q_len, 1, dtype=seq_lens.dtype, device=query.device)).flatten()
    rows = batch * q_len
    splits = _splits(max_seq_len, query.device)
    result = query.new_zeros(rows, heads, kv_lora_rank)
    natural = torch.zeros(rows, heads, device=query.device)
    decode_attention_fwd(
        query.flatten(0, 1),
        pool,
        pool[..., :kv_lora_rank],
        result,
        natural,
        block_tables.repeat_interleave(q_len, 0),
        lengths.clamp(min=0),
        torch.empty(rows, heads, splits, kv_lora_rank + 1, device=query.device),
        splits,
        bmm1_scale,
        pool.shape[1],
        is_mla=True,
    )
    if out is None:
        out = torch.empty(batch, q_len, heads, kv_lora_rank, dtype=torch.bfloat16, device=query.device)
    out.copy_((bmm2_scale * result.float()).reshape(out.shape))
    if lse is None:
        lse = torch.empty_like(natural)
    lse.copy_((natural if return_lse_base == "basee" else natural / math.log(2)).view(lse.shape))
    return (out, lse) if return_lse else out


def _splits(max_seq_len: int, device: torch.device) -> int:
    """The backend's rule: a power of 2 with 512 keys a split or more, at most two programs per multiprocessor."""
    wanted = 1 << (max(1, max_seq_len // 512) - 1).bit_length()
    return min(wanted, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
