"""FlashMLA's sparse kernel for Hopper over a bfloat16 pool: top-k lists, with sinks.

Get it: `pip install --no-deps sgl-flash-mla==1.0.0`, as for `flashmla.py`. Upstream calls it the sparse prefill kernel;
engines decode with it where the pool is in bfloat16, one query token per row.

    python -m mla check examples.flashmla_sparse:decode --device cuda

Declared, from its docstring: bfloat16, top-k lists alone, sinks, int32 lists, up to 128 heads, pools whose tokens lie
at one stride. Not declared: dense tables, other strided layouts of a pool, scales on the device.

Done here, as vLLM and SGLang do it: entries that do not count become -1 and the list is filled up with -1 to a multiple
of 128; heads are filled up to 64 or 128 with zeros; the sink, which the kernel leaves out of its lse, joins it; a row
without a key has lse = +inf there and -inf here. The kernel has no bmm2: it multiplies the output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from mla.testing import Profile

profile = Profile(
    pairs=(("bfloat16", "bfloat16"),),
    dense=False,
    heads=tuple(range(1, 129)),
    strides=False,
    scale_tensors=False,
    index_dtypes=("int32",),
    any_scale=False,
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
    block_tables: torch.Tensor,  # [B, Q, K]
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
    """The call, by `flash_mla_sparse_fwd`."""
    from flash_mla.flash_mla_interface import flash_mla_sparse_fwd

    if not sparse_mla_top_k or isinstance(bmm1_scale, torch.Tensor):
        raise NotImplementedError("FlashMLA's sparse kernel takes top-k lists alone, and no scale on the device")
    batch, q_len, heads, dim = query.shape
    rows, wide = (batch, q_len, heads), math.ceil(heads / 64) * 64
    if not batch:
        empty = query.new_empty(*rows, kv_lora_rank)
        return _answer(empty, empty[..., 0].float(), bmm2_scale, out, return_lse, lse, return_lse_base)
    rank = torch.arange(sparse_mla_top_k, device=query.device)
    visible = seq_lens[:, None] + torch.arange(1 - q_len, 1, device=query.device)  # [B, Q]
    slots = torch.where((rank < visible[..., None]) & (block_tables >= 0), block_tables, -1)
    sink = sinks[0] if isinstance(sinks, list | tuple) else sinks
    result, _, natural = flash_mla_sparse_fwd(
        pad(query.flatten(0, 1), (0, 0, 0, wide - heads)),  # [B * Q, H, D]
        kv_cache.view(-1, 1, dim),
        pad(slots, (0, -sparse_mla_top_k % 128), value=-1).view(batch * q_len, 1, -1),
        bmm1_scale,
        kv_lora_rank,
        attn_sink=None if sink is None else pad(sink.float(), (0, wide - heads)),
        use_legacy=True,
    )  # [B * Q, H, R], maxima, [B * Q, H]
    result = result[:, :heads].view(*rows, kv_lora_rank)
    natural = torch.where(natural == math.inf, -math.inf, natural)[:, :heads].view(rows)
    if sink is not None:
        natural = torch.logaddexp(natural, sink.float())
    return _answer(result, natural, bmm2_scale, out, return_lse, lse, return_lse_base)


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
