"""A typical problem from a few sizes, on no device: its tensors are on PyTorch's `meta` device and hold nothing."""

from __future__ import annotations

import argparse
import dataclasses

import torch

from mla.cli.devices import Device
from mla.cli.tables import UsageError
from mla.problem import Problem

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
TOKENS = 4096  # per request; no backend's answer may depend on it


def short_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bf16"."""
    return next(name for name, known in DTYPES.items() if known is dtype)


def positive(text: str) -> int:
    """An argparse type: a positive int."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def not_negative(text: str) -> int:
    """An argparse type: an int >= 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def typical_problem(
    *, query_dtype: str, kv_dtype: str, heads: int, q_len: int, page_size: int, top_k: int, sinks: bool
) -> Problem:
    """One request of these sizes.

    Raises:
        UsageError: the contract allows no such call.
    """
    pages = -(-TOKENS // page_size)
    table_shape = (1, q_len, top_k) if top_k else (1, pages)
    try:
        return Problem.from_call(
            query=torch.empty(1, q_len, heads, 576, dtype=DTYPES[query_dtype], device="meta"),
            kv_cache=torch.empty(pages, page_size, 576, dtype=DTYPES[kv_dtype], device="meta"),
            workspace_buffer=None,
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            block_tables=torch.empty(table_shape, dtype=torch.int32, device="meta"),
            seq_lens=torch.empty(1, dtype=torch.int32, device="meta"),
            max_seq_len=TOKENS,
            sparse_mla_top_k=top_k,
            sinks=torch.empty(heads, device="meta") if sinks else None,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"no legal call: {error}") from error


def on_device(problem: Problem, device: Device) -> Problem:
    """The same problem, as if its tensors were there."""
    return dataclasses.replace(problem, device=torch.device(device.label), capability=device.capability)
