"""SGLang's Triton decode kernel, `decode_attention_fwd`, called as its Triton backend calls it for MLA.

Get it: `pip install sglang==0.5.10.post1`, or the one file of that wheel
`sglang/srt/layers/attention/triton_ops/decode_attention.py` beside a stub of `sglang.srt.utils` (see README.md).
Any GPU that Triton compiles for.

    python -m mla check examples.sglang_triton:decode --device cuda

Declared, from its docstring and the backend around it: bfloat16 and float16, one query token a request, any head count,
sinks, any page size (it knows token slots alone), pools whose tokens lie at one stride. Not declared: an lse (it writes
none), top-k, Q > 1 (the engine has another kernel for that), scales on the device, rows without a key (0 / 0).

Done here: the table becomes a list of token slots, int64 as in the engine; the kernel's own v_scale takes bmm2.
"""

from __future__ import annotations

import torch

from mla.testing import Profile

SPLITS = 8  # the engine's default, `--triton-attention-num-kv-splits`

profile = Profile(
    pairs=(("bfloat16", "bfloat16"), ("float16", "float16")),
    sparse=False,
    lse=False,
    max_q_len=1,
    strides=False,
    scale_tensors=False,
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
) -> torch.Tensor:
    """The call, by `decode_attention_fwd`."""
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    batch, q_len, heads, dim = query.shape
    on_device = isinstance(bmm1_scale, torch.Tensor) or isinstance(bmm2_scale, torch.Tensor)
    if sparse_mla_top_k or q_len != 1 or return_lse or lse is not None or on_device:
        raise NotImplementedError(
            "SGLang's Triton kernel has no top-k list, no Q > 1, no lse and no scale on the device"
        )
    device, page_size = query.device, kv_cache.shape[-2]
    tokens = block_tables.long()[:, :, None] * page_size + torch.arange(page_size, device=device)  # [B, W, P]
    tokens = tokens.flatten(1)
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    starts[1:] = seq_lens.cumsum(0)
    slots = kv_cache.view(-1, 1, dim)
    result = query.new_zeros(batch, heads, kv_lora_rank)
    sink = sinks[0] if isinstance(sinks, list | tuple) else sinks
    decode_attention_fwd(
        query[:, 0],
        slots,
        slots[..., :kv_lora_rank],
        result,
        starts,
        tokens[torch.arange(tokens.shape[1], device=device) < seq_lens[:, None]],
        torch.empty(batch, heads, SPLITS, kv_lora_rank, device=device),
        torch.empty(batch, heads, SPLITS, device=device),
        torch.full((batch,), SPLITS, dtype=torch.int32, device=device),
        SPLITS,
        bmm1_scale,
        1.0,  # k_scale
        bmm2_scale,
        sinks=None if sink is None else sink.float(),
    )
    if out is None:
        out = torch.empty(batch, 1, heads, kv_lora_rank, dtype=torch.bfloat16, device=device)
    out.copy_(result.view(out.shape))
    return out
