"""Shared by all tests: uninitialised memory is NaN, and two short ways to make a call by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import mla

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here; the same test runs on the CPU"),
        ],
    ),
]

torch.set_num_threads(1)  # many small tensors: more threads only wait for each other, and tests run in parallel

# torch fills torch.empty with NaN (integers: their largest) in this mode, so that what nobody wrote shows.
torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long begin first, so that none is left alone with one processor at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(params=["reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that claims the whole contract on this machine."""
    name: str = request.param
    return name


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def decode(backend: str) -> Callable[..., Any]:
    """The call with its constant arguments filled in: decode(query, cache, tables, lengths, **others)."""

    def call(
        query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, **others: Any
    ) -> Any:
        others = {"backend": backend, "workspace_buffer": None, "max_seq_len": 1 << 20} | others
        return mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query,
            kv_cache=cache,
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            block_tables=tables,
            seq_lens=lengths,
            **others,
        )

    return call


def in_pages(
    latents: Sequence[torch.Tensor], page_size: int, *, fill: float = math.nan, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-request latents [n, 576] laid into shuffled pages: (cache [N, P, 576], tables [B, W], lengths [B])."""
    counts = [math.ceil(len(rows) / page_size) for rows in latents]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    dtype = latents[0].dtype if latents else torch.bfloat16
    cache = torch.full((len(order), page_size, 576), fill, dtype=dtype)
    tables = torch.full((len(latents), max([*counts, 1])), -1, dtype=torch.int32)
    for b, rows in enumerate(latents):
        for column in range(counts[b]):
            page = order.pop()
            tables[b, column] = page
            part = rows[column * page_size : (column + 1) * page_size]
            cache[page, : len(part)] = part
    return cache, tables, torch.tensor([len(rows) for rows in latents], dtype=torch.int32)


@pytest.fixture
def paged() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return in_pages


def filled(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[n, 576]: token t's whole latent is values[t]."""
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(len(values), 576).to(dtype)


@pytest.fixture
def constant() -> Callable[..., torch.Tensor]:
    return filled
