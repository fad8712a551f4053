"""Memory as a kernel without bounds checks sees it: one long row of elements, of which a view shows a part."""

from __future__ import annotations

import torch

from mla.problem import Problem
from mla.testing.emulate import Kernel


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """[everything] the buffer behind a view."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def load(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The elements at `offsets` from the first of `tensor`, by address alone.

    What lies outside of the buffer cannot be known; its nearest element stands for that. An empty buffer reads as 0.
    """
    memory = whole(tensor)
    if not memory.numel():
        return torch.zeros(offsets.shape, dtype=tensor.dtype, device=tensor.device)
    return memory[(offsets + int(tensor.storage_offset())).clamp(0, memory.numel() - 1)]


def load_as_int32(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same, taking the buffer for one of int32. Offsets count elements of 4 bytes."""
    memory = whole(tensor).view(torch.int32)
    first = tensor.storage_offset() * tensor.element_size() // 4
    return memory[(offsets + first).clamp(0, memory.numel() - 1)]


def store(tensor: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    """Write `values` [n] at `offset` from the first element of `tensor`, as far as the buffer reaches."""
    memory = whole(tensor)
    start = tensor.storage_offset() + offset
    fitting = max(0, min(len(values), memory.numel() - start))
    memory[start : start + fitting] = values[:fitting].to(tensor.dtype)


class Careless(Kernel):
    """An honest kernel with finer steps, which goes on where an index leaves the table or the pool.

    Each step from a position to an address may be overridden by itself. An index outside takes the nearest one inside,
    so that a wrong step gives a wrong number and no error.
    """

    def slots(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        if p.is_sparse:
            listed = self.listed(p, b, t, n)
            return listed[(listed >= 0) & (listed < p.num_pages * p.page_size)]
        if not p.table_width:
            return torch.zeros(0, dtype=torch.int64, device=p.device)
        position = torch.arange(min(n, (p.table_width + 1) * p.page_size), device=p.device)
        page = self.page(p, b, t, position // p.page_size)
        return page * p.page_size + position % p.page_size

    def listed(self, p: Problem, b: int, t: int, n: int) -> torch.Tensor:
        """[n'] the entries of a sparse list that count, holes included."""
        return p.block_tables[b, t, :n].to(torch.int64)

    def page(self, p: Problem, b: int, t: int, column: torch.Tensor) -> torch.Tensor:
        """The pages in those columns of the request's row."""
        return p.block_tables[b, column.clamp(0, p.table_width - 1)].to(torch.int64)

    def keys(self, p: Problem, slots: torch.Tensor) -> torch.Tensor:
        pool = p.num_pages * p.page_size
        if not pool:
            return torch.zeros(len(slots), p.head_dim, device=p.device)
        slots = slots.clamp(0, pool - 1)
        address = self.address(p, slots // p.page_size, slots % p.page_size)  # [n]
        lanes = torch.arange(p.head_dim, device=p.device)
        return self.number(load(p.kv_cache, address[:, None] + lanes))  # [n, D]

    def address(self, p: Problem, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """[n] where those rows begin, in elements from the start of the cache."""
        return page * p.kv_cache.stride(0) + offset * p.kv_cache.stride(1)

    def number(self, stored: torch.Tensor) -> torch.Tensor:
        """fp32 of what is stored."""
        return stored.to(torch.float32)
