"""The tensors of a case, made where they are needed: shuffled pages, random numbers, no wide copy of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mla.bench.cases import BenchCase
from mla.bench.floors import D, R

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
SCALE = (128 + 64) ** -0.5
CHUNK = 1 << 24  # numbers drawn at once: 64 MiB in float32


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call, ready to be made by anybody.

    Attributes:
        case: where it came from.
        query: [B, Q, H, D]. pool: [N, P, D], every page of it in use.
        tables: [B, W] int32 page ids; columns past a length hold 0, a page that exists.
        lengths: [B] int32.
        slots: [B, Q, K] int32, or None when dense. The Q lists of a request are equal.
        max_seq_len: the bound that goes into the call.
    """

    case: BenchCase
    query: torch.Tensor
    pool: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor | None
    max_seq_len: int

    @property
    def device(self) -> torch.device:
        return self.query.device

    def arguments(self, workspace: torch.Tensor | None) -> dict[str, Any]:
        """Keyword arguments of `mla.trtllm_batch_decode_with_kv_cache_mla`, without `backend`."""
        return {
            "query": self.query,
            "kv_cache": self.pool,
            "workspace_buffer": workspace,
            "qk_nope_head_dim": 128,
            "kv_lora_rank": R,
            "qk_rope_head_dim": D - R,
            "block_tables": self.tables if self.slots is None else self.slots,
            "seq_lens": self.lengths,
            "max_seq_len": self.max_seq_len,
            "sparse_mla_top_k": self.case.top_k,
            "bmm1_scale": SCALE,
            "bmm2_scale": 1.0,
        }


def make(case: BenchCase, device: torch.device, seed: int = 0, max_seq_len: int | None = None) -> Inputs:
    """The tensors of a case, the same on every run of a device type.

    Args:
        max_seq_len: the bound to pass, and the tokens that the tables have columns for; None is the longest length.

    Raises:
        ValueError: the bound is below the longest length.
    """
    bound = case.longest if max_seq_len is None else max_seq_len
    if bound < case.longest:
        raise ValueError(f"max_seq_len is {bound}; case {case.name} has a request of {case.longest} tokens")
    size, dtype = case.page_size, TORCH_DTYPES[case.dtype]
    order = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(case.lengths)
    pages = (lengths + size - 1) // size  # [B]
    total = int(pages.sum())
    tables = torch.zeros(case.batch, -(-bound // size), dtype=torch.int32)
    tables[torch.arange(tables.shape[1]) < pages[:, None]] = torch.randperm(total, generator=order).to(torch.int32)
    slots = None
    if case.top_k:
        lists = torch.stack([_one_list(case, b, tables[b], order) for b in range(case.batch)])  # [B, K]
        slots = lists[:, None].expand(case.batch, case.q_len, case.top_k).contiguous().to(device)
    numbers = torch.Generator(device).manual_seed(seed)
    return Inputs(
        case,
        query=_normal((case.batch, case.q_len, case.heads, D), dtype, numbers),
        pool=_normal((total, size, D), dtype, numbers),
        tables=tables.to(device),
        lengths=lengths.to(torch.int32).to(device),
        slots=slots,
        max_seq_len=bound,
    )


def _one_list(case: BenchCase, request: int, pages: torch.Tensor, order: torch.Generator) -> torch.Tensor:
    """[K] distinct token slots of a request in random order, and -1 after its last token."""
    position = torch.randperm(case.lengths[request], generator=order)[: case.top_k]
    slots = pages[position // case.page_size] * case.page_size + position % case.page_size
    return torch.nn.functional.pad(slots, (0, case.top_k - len(slots)), value=-1).to(torch.int32)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, numbers: torch.Generator) -> torch.Tensor:
    """Standard normal numbers in any dtype, drawn in float32 piece by piece."""
    made = torch.empty(shape, dtype=dtype, device=numbers.device)
    flat = made.view(-1)
    for start in range(0, len(flat), CHUNK):
        piece = flat[start : start + CHUNK]
        piece.copy_(torch.randn(piece.shape, generator=numbers, device=numbers.device))
    return made
