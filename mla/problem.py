"""One decode call, checked once: the only thing a backend ever sees.

Letters, here and everywhere: B requests, Q query tokens per request, H heads, N pages, P page size, W table width,
R = kv_lora_rank = 512, D = R + qk_rope_head_dim = 576, K = sparse top-k.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from mla import checks

LseBase = Literal["base2", "basee"]


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """A legal problem. Every field was checked by `from_call`; a backend does not check again and does not guess.

    Tensors keep the strides they came with. The last stride of `query`, `kv_cache` and `out` is 1; nothing else about
    strides is promised. Lengths, page ids and slots live on the device and have been read by nobody.
    """

    query: torch.Tensor  #: [B, Q, H, D]
    kv_cache: torch.Tensor  #: [N, P, D], a view without the caller's axis of size 1
    block_tables: torch.Tensor  #: [B, W] page ids, or [B, Q, K] token slots when top_k > 0; int32 or int64
    seq_lens: torch.Tensor  #: [B], int32 or int64, the request's Q new tokens included
    max_seq_len: int  #: a bound for sizing, never a meaning
    top_k: int  #: K; 0 is dense
    bmm1_scale: float | torch.Tensor  #: a float rounded to fp32, or an fp32 tensor of shape []
    bmm2_scale: float | torch.Tensor  #: the same forms
    sinks: torch.Tensor | None  #: [H] fp32, natural-log logits
    workspace: torch.Tensor | None  #: scratch of any dtype, contiguous; None or too small is legal
    out: torch.Tensor | None  #: the caller's buffer as [B, Q, H, R], or None
    lse: torch.Tensor | None  #: the caller's buffer as [B, Q, H], or None
    out_dtype: torch.dtype  #: bf16 unless `out` says otherwise
    wants_lse: bool  #: the log-sum-exp must be written
    lse_base: LseBase  #: "base2" or "basee"
    enable_pdl: bool | None  #: None is where the GPU supports it; never changes a bit
    deterministic: bool  #: a row's bits must depend neither on its batch mates nor on B or max_seq_len
    qk_nope_head_dim: int  #: 128; no part of the arithmetic
    kv_lora_rank: int  #: R
    qk_rope_head_dim: int  #: D - R
    batch: int  #: B
    q_len: int  #: Q
    num_heads: int  #: H
    num_pages: int  #: N
    page_size: int  #: P
    device: torch.device  #: of every tensor
    capability: tuple[int, int] | None  #: compute capability of an NVIDIA device, None elsewhere
    kind: Hashable = None  #: equal for calls that differ in addresses, device values, floats and max_seq_len at most

    @property
    def head_dim(self) -> int:
        """D, the width of a query and of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def table_width(self) -> int:
        """W, the columns of a dense block table (K when sparse)."""
        return self.block_tables.shape[-1]

    @property
    def is_sparse(self) -> bool:
        """True when the block table holds token slots."""
        return self.top_k > 0

    @property
    def is_empty(self) -> bool:
        """True when there is no row to compute (B or Q is 0)."""
        return self.batch * self.q_len == 0

    @classmethod
    def from_call(
        cls,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        workspace_buffer: torch.Tensor | None,
        qk_nope_head_dim: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        sparse_mla_top_k: int = 0,
        out: torch.Tensor | None = None,
        bmm1_scale: float | torch.Tensor = 1.0,
        bmm2_scale: float | torch.Tensor = 1.0,
        sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
        enable_pdl: bool | None = None,
        *,
        return_lse: bool = False,
        lse: torch.Tensor | None = None,
        return_lse_base: str | None = None,
        deterministic: bool = False,
        kind: Hashable = None,
    ) -> Problem:
        """Check the arguments of `mla.trtllm_batch_decode_with_kv_cache_mla` and normalise them.

        Only shapes, strides, dtypes, devices and Python numbers are looked at: nothing is read from a device, written
        or launched (casting `sinks` to fp32, which comes last, is the one exception). See that function for the
        meaning of each argument; `kind` is kept as it is.

        Returns:
            The problem.

        Raises:
            ValueError: shapes, ranks, sizes, devices that differ.
            TypeError: dtypes and kinds.
        """
        nope, rank, rope = checks.latent_dims(qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim)
        batch, q_len, heads = checks.query(query, rank, rope)
        cache = checks.kv_cache(kv_cache, rank, rope)
        checks.dtype_pair(query, kv_cache)
        top_k = checks.count("sparse_mla_top_k", sparse_mla_top_k)
        bound = checks.count("max_seq_len", max_seq_len)
        device = query.device
        checks.block_tables(block_tables, batch, q_len, top_k)
        checks.seq_lens(seq_lens, batch)
        scale1 = checks.scale("bmm1_scale", bmm1_scale, device)
        scale2 = checks.scale("bmm2_scale", bmm2_scale, device)
        sink = checks.sinks(sinks, heads)
        checks.workspace(workspace_buffer)
        out_view = checks.out(out, batch, q_len, heads, rank)
        lse_view = checks.lse(lse, batch, q_len, heads)
        checks.flag("return_lse", return_lse)
        checks.flag("deterministic", deterministic)
        if enable_pdl is not None:
            checks.flag("enable_pdl", enable_pdl)
        base = checks.lse_base("return_lse_base", return_lse_base)
        checks.same_device(
            device,
            kv_cache=kv_cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            sinks=sink,
            workspace_buffer=workspace_buffer,
            out=out,
            lse=lse,
        )
        inputs: dict[str, object] = {"query": query, "kv_cache": cache, "block_tables": block_tables}
        inputs |= {"seq_lens": seq_lens, "bmm1_scale": scale1, "bmm2_scale": scale2, "sinks": sink}
        checks.no_overlap({"out": out_view, "lse": lse_view}, inputs)
        return cls(
            query=query,
            kv_cache=cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seq_len=bound,
            top_k=top_k,
            bmm1_scale=scale1,
            bmm2_scale=scale2,
            sinks=None if sink is None else sink.detach().to(torch.float32),
            workspace=workspace_buffer,
            out=out_view,
            lse=lse_view,
            out_dtype=torch.bfloat16 if out is None else out.dtype,
            wants_lse=return_lse or lse is not None,
            lse_base=base,
            enable_pdl=enable_pdl,
            deterministic=deterministic,
            qk_nope_head_dim=nope,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            batch=batch,
            q_len=q_len,
            num_heads=heads,
            num_pages=cache.shape[0],
            page_size=cache.shape[1],
            device=device,
            capability=compute_capability(device),
            kind=kind,
        )

    def describe(self) -> str:
        """One line for messages: mode, sizes and dtypes, no device value."""
        mode = f"sparse top {self.top_k}" if self.is_sparse else f"dense, table width {self.table_width}"
        where = (
            f"{self.device}"
            if self.capability is None
            else f"{self.device} (sm_{self.capability[0]}{self.capability[1]})"
        )
        return (
            f"B={self.batch} Q={self.q_len} H={self.num_heads}, {mode}, {self.num_pages} pages of {self.page_size}, "
            f"{checks.short(self.query.dtype)} query, {checks.short(self.kv_cache.dtype)} cache, "
            f"{checks.short(self.out_dtype)} out, {'with' if self.sinks is not None else 'no'} sinks, on {where}"
        )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) of an NVIDIA GPU; None for a CPU, another vendor's GPU and anything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _capability_of(device)


@cache
def _capability_of(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
